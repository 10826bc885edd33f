#include "paceline/client.hpp"

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "call_plan.hpp"
#include "connection.hpp"
#include "request.hpp"
#include "responses.hpp"
#include "transcript.hpp"

namespace paceline {
namespace detail {
/// What a generation, and whoever reads it, share.
class GenerationState {
 public:
  GenerationState(std::shared_ptr<Connection> connection, std::shared_ptr<RetryBudget> budget,
                  Transcript so_far, Seconds timeout, int resume_attempts)
      : transcript(std::move(so_far)),
        connection_(std::move(connection)),
        budget_(std::move(budget)),
        timeout_(checked_timeout(timeout)),
        resume_attempts_(checked_attempts(resume_attempts)) {}

  CallPlan plan() const { return {timeout_, resume_attempts_, budget_}; }

  /// Become the reader. Throws InvalidFieldError if there is one.
  void begin_reading() {
    if (is_read_.exchange(true)) {
      throw InvalidFieldError::of(
          "generation", "has two readers: let one read it, or give each its own by resume()");
    }
  }

  void end_reading() noexcept { is_read_ = false; }

  /// Send the request for what is missing. Throws ClientCancelledError after cancel().
  std::shared_ptr<Call> open(Seconds timeout) {
    const std::shared_ptr<Call> call = connection_->new_call();
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

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<RetryBudget> budget_;
  const Seconds timeout_;
  const int resume_attempts_;
  std::atomic<bool> is_read_{false};
  std::mutex mutex_;  // guards what follows
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
    call_ = state_->open(plan_.remaining());
    was_refused_ = true;
  }

  // Go on after the end of a stream: with the next one, if it broke.
  void finish_call() {
    const auto error = call_->finish();
    call_.reset();
    if (!error) {
      state_->transcript.check_complete();
    } else if (!state_->transcript.finished()) {
      state_->wait(plan_.delay(*error, was_refused_));
    }
  }

  std::shared_ptr<GenerationState> state_;
  CallPlan plan_;
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
const std::vector<Chunk>& Generation::chunks() const { return state_->transcript.chunks(); }

Client::Client(const std::string& address, const ClientOptions& options)
    : connection_(detail::open_connection(address, options)),
      budget_(std::make_shared<detail::RetryBudget>()),
      timeout_(detail::checked_timeout(options.timeout)) {}

Generation Client::generate(const Prompt& prompt, const GenerateOptions& options,
                            const CallOptions& call) const {
  return Generation(std::make_shared<detail::GenerationState>(
      connection_, budget_, detail::Transcript(detail::build_request(prompt, options)),
      call.timeout.value_or(timeout_), call.resume_attempts));
}

Generation Client::resume(const Generation& generation, const CallOptions& call) const {
  return Generation(std::make_shared<detail::GenerationState>(
      connection_, budget_, generation.state_->transcript, call.timeout.value_or(timeout_),
      call.resume_attempts));
}

SystemInfo Client::system_info(std::optional<Seconds> timeout) const {
  return detail::read_system_info(
      connection_->get_system_info(detail::checked_timeout(timeout.value_or(timeout_))));
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
