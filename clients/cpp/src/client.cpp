#include "paceline/client.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "call_metadata.hpp"
#include "call_plan.hpp"
#include "connection.hpp"
#include "endpoints.hpp"
#include "request.hpp"
#include "responses.hpp"
#include "transcript.hpp"

namespace paceline {
namespace detail {
/// The common state of a client's calls.
class ClientState {
 public:
  ClientState(const std::string& addresses, const ClientOptions& options)
      : endpoints(open_endpoints(addresses, options)),
        metadata(options.metadata, options.token),
        timeout_(checked_timeout(options.timeout)) {}

  Seconds timeout(std::optional<Seconds> own) const {
    return own ? checked_timeout(*own) : timeout_;
  }

  /// Without a number of attempts, a generation resumes if there may be another orchestrator.
  CallPlan plan(Seconds timeout, std::optional<int> resume_attempts) const {
    if (!resume_attempts && !endpoints.may_be_several()) resume_attempts = 0;
    return {timeout, resume_attempts, budget_, endpoints.count()};
  }

  Endpoints endpoints;
  const CallMetadata metadata;

 private:
  const std::shared_ptr<RetryBudget> budget_ = std::make_shared<RetryBudget>();
  const Seconds timeout_;
};

/// The state that a generation shares with its reader.
class GenerationState {
 public:
  GenerationState(std::shared_ptr<ClientState> client, Transcript so_far, const CallOptions& call)
      : transcript(std::move(so_far)),
        client_(std::move(client)),
        timeout_(client_->timeout(call.timeout)),
        resume_attempts_(checked_attempts(call.resume_attempts)),
        own_metadata_(call.metadata) {
    check_metadata(own_metadata_);
  }

  Endpoints& endpoints() { return client_->endpoints; }

  CallPlan plan() const { return client_->plan(timeout_, resume_attempts_); }

  /// Become the reader. Throws InvalidFieldError if there is one.
  void begin_reading() {
    if (is_read_.exchange(true)) {
      throw InvalidFieldError::of(
          "generation", "has two readers: let one read it, or give each its own by resume()");
    }
  }

  void end_reading() noexcept { is_read_ = false; }

  /// Send the request for the missing part. Throws ClientCancelledError after cancel(), and the
  /// exceptions of the client's metadata and token.
  std::shared_ptr<Call> open(Connection& connection, Seconds timeout) {
    const std::shared_ptr<Call> call = connection.new_call(client_->metadata.pairs(own_metadata_));
    {
      const std::lock_guard lock(mutex_);
      check_open();
      call_ = call;
    }
    call->start(transcript.next_request(), timeout);  // unlocked: cancel() may end the wait
    return call;
  }

  /// Sleep. Throws ClientCancelledError at cancel().
  void wait(Seconds delay) {
    std::unique_lock lock(mutex_);
    cancelled_changed_.wait_for(lock, delay, [this] { return cancelled_; });
    check_open();
  }

  void cancel() noexcept {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    if (const auto call = call_.lock()) call->cancel();
    cancelled_changed_.notify_all();
  }

  Transcript transcript;  // the reading thread's

 private:
  void check_open() const {
    if (cancelled_) {
      throw ClientCancelledError("the generation was cancelled; resume() goes on with it");
    }
  }

  const std::shared_ptr<ClientState> client_;
  const Seconds timeout_;
  const std::optional<int> resume_attempts_;
  const Metadata own_metadata_;
  std::atomic<bool> is_read_{false};
  std::mutex mutex_;  // guards the fields below
  std::condition_variable cancelled_changed_;
  bool cancelled_ = false;
  std::weak_ptr<Call> call_;
};

namespace {

class GenerationReader final : public Reader {
 public:
  explicit GenerationReader(std::shared_ptr<GenerationState> state)
      : state_(std::move(state)), plan_(state_->plan()) {
    state_->begin_reading();
  }

  ~GenerationReader() override {
    call_.reset();  // the next reader may begin when this one's call is over
    lease_.reset();
    state_->end_reading();
  }

  bool next() override {
    auto& transcript = state_->transcript;
    while (call_ || !transcript.finished()) {
      if (!call_) open();
      for (v1::GenerateResponse response; call_->read(response);) {
        was_refused_ = false;
        if (auto event = transcript.add(response)) {
          event_ = std::move(*event);
          if (std::holds_alternative<Chunk>(event_)) hear();
          return true;
        }
      }
      finish_call();
    }
    return false;
  }

  const Event& event() const override { return event_; }

 private:
  void open() {
    lease_ = state_->endpoints().lend(plan_.asked());
    call_ = state_->open(*lease_->connection, plan_.remaining());
    was_refused_ = true;
  }

  void hear() {
    plan_.hear();
    state_->endpoints().answered(*lease_);
  }

  // Go on after the end of a stream: with the next one, if it broke.
  void finish_call() {
    const auto error = call_->finish();
    call_.reset();
    const auto* at = lease_.get();
    if (dynamic_cast<const TryAgainError*>(error.get())) state_->endpoints().failed(*lease_);
    lease_.reset();
    if (!error) {
      state_->transcript.check_complete();
    } else if (!state_->transcript.finished()) {
      state_->wait(plan_.delay(*error, at, was_refused_));
    }
  }

  std::shared_ptr<GenerationState> state_;
  CallPlan plan_;
  Endpoints::Lease lease_;  // before call_, which runs there
  std::shared_ptr<Call> call_;
  bool was_refused_ = true;  // nothing of it has come
  Event event_;
};

}  // namespace
}  // namespace detail

StreamIterator<Event> EventRange::begin() const {
  return StreamIterator<Event>(std::make_shared<detail::GenerationReader>(state_));
}

Generation::Generation(std::shared_ptr<detail::GenerationState> state) : state_(std::move(state)) {}

Generation& Generation::operator=(Generation&& other) noexcept {
  cancel();
  state_ = std::move(other.state_);
  return *this;
}

Generation::~Generation() { cancel(); }

StreamIterator<Chunk> Generation::begin() {
  return StreamIterator<Chunk>(std::make_shared<detail::GenerationReader>(state_));
}

Completion Generation::collect() {
  for ([[maybe_unused]] const auto& chunk : *this) {
  }
  return state_->transcript.completion();
}

void Generation::cancel() noexcept {
  if (state_) state_->cancel();
}

const std::optional<Started>& Generation::started() const { return state_->transcript.started(); }
const std::optional<Finished>& Generation::finished() const {
  return state_->transcript.finished();
}
const std::vector<PromptChunk>& Generation::prompt_chunks() const {
  return state_->transcript.prompt_chunks();
}
const std::vector<Chunk>& Generation::chunks() const { return state_->transcript.chunks(); }

Client::Client(const std::string& address, const ClientOptions& options)
    : state_(std::make_shared<detail::ClientState>(address, options)) {}

Generation Client::generate(const Prompt& prompt, const GenerateOptions& options,
                            const CallOptions& call) const {
  return Generation(std::make_shared<detail::GenerationState>(
      state_, detail::Transcript(detail::build_request(prompt, options)), call));
}

Generation Client::resume(const Generation& generation, const CallOptions& call) const {
  return Generation(std::make_shared<detail::GenerationState>(
      state_, generation.state_->transcript, call));
}

SystemInfo Client::info(std::optional<Seconds> timeout, const Metadata& metadata) const {
  auto& endpoints = state_->endpoints;
  auto plan = state_->plan(state_->timeout(timeout), 0);
  detail::Asked asked;
  while (true) {
    const auto endpoint = endpoints.lend(asked);
    const auto along = state_->metadata.pairs(metadata);
    try {
      return detail::read_system_info(
          endpoint->connection->get_system_info(along, plan.remaining()));
    } catch (const TryAgainError& error) {
      endpoints.failed(*endpoint);
      if (const auto pause = plan.resend(error, endpoint.get())) {
        asked = plan.asked();
        std::this_thread::sleep_for(*pause);
        continue;
      }
      asked.insert(endpoint.get());
      if (asked.size() == endpoints.count()) throw;
    }
  }
}

std::string Completion::text() const {
  std::string text;
  for (const auto& chunk : chunks) text += chunk.text;
  return text;
}

std::vector<std::int64_t> Completion::token_ids() const {
  std::vector<std::int64_t> ids;
  for (const auto& chunk : chunks) {
    ids.insert(ids.end(), chunk.token_ids.begin(), chunk.token_ids.end());
  }
  return ids;
}

}  // namespace paceline
