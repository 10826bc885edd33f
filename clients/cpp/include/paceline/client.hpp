// The client: blocking, one thread for each generation that is read at the same time.

#ifndef PACELINE_CLIENT_HPP_
#define PACELINE_CLIENT_HPP_

#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "paceline/errors.hpp"
#include "paceline/generation.hpp"
#include "paceline/options.hpp"

namespace paceline {

namespace detail {

class ClientState;
class GenerationState;

// One pass over a generation's stream. Destroying it cancels the RPC and waits for its end.
class Reader {
 public:
  virtual ~Reader() = default;
  virtual bool next() = 0;  // move to the next event; false at the end
  virtual const Event& event() const = 0;
};

}  // namespace detail

/// An input iterator over Chunk or Event. The last copy cancels the RPC when it is destroyed.
template <class Value>
class StreamIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = Value;
  using difference_type = std::ptrdiff_t;
  using pointer = const Value*;
  using reference = const Value&;

  StreamIterator() = default;  // the end
  explicit StreamIterator(std::shared_ptr<detail::Reader> reader) : reader_(std::move(reader)) {
    ++*this;
  }

  reference operator*() const { return *value_of(reader_->event()); }
  pointer operator->() const { return value_of(reader_->event()); }

  /// Wait for the next one. After an error the iterator is the end.
  StreamIterator& operator++() {
    auto reader = std::move(reader_);
    while (reader->next()) {
      if (value_of(reader->event()) != nullptr) {
        reader_ = std::move(reader);
        break;
      }
    }
    return *this;
  }

  friend bool operator==(const StreamIterator& a, const StreamIterator& b) {
    return a.reader_ == b.reader_;
  }
  friend bool operator!=(const StreamIterator& a, const StreamIterator& b) { return !(a == b); }

 private:
  static pointer value_of(const Event& event) {
    if constexpr (std::is_same_v<Value, Event>) {
      return &event;
    } else {
      return std::get_if<Value>(&event);
    }
  }

  std::shared_ptr<detail::Reader> reader_;
};

/// What Generation::events() returns, for a range-for.
class EventRange {
 public:
  explicit EventRange(std::shared_ptr<detail::GenerationState> state) : state_(std::move(state)) {}
  StreamIterator<Event> begin() const;
  StreamIterator<Event> end() const { return {}; }

 private:
  std::shared_ptr<detail::GenerationState> state_;
};

/// A generation as it streams; iterating sends the request.
///
/// Cancellation: leaving the loop (break, return, an exception) cancels the RPC and waits for its
/// end, and all work of the servers for it. So does the destructor. What was received stays: a new
/// iteration continues there, and after cancel() so does Client::resume.
///
/// Concurrency: one reader at a time, and a second one gets an InvalidFieldError; cancel() may be
/// called by any thread.
///
/// Iterating throws PacelineError; the class says what to do.
class Generation {
 public:
  explicit Generation(std::shared_ptr<detail::GenerationState> state);
  Generation(Generation&&) noexcept = default;
  Generation& operator=(Generation&& other) noexcept;
  ~Generation();

  StreamIterator<Chunk> begin();
  StreamIterator<Chunk> end() { return {}; }

  /// Iterate over chunks and, with `stream_timeline`, over the timeline's events.
  EventRange events() & { return EventRange(state_); }
  EventRange events() && = delete;  // a range-for would outlive the generation

  /// Wait for the end, and return the whole completion, a resumed one from its start.
  Completion collect();
  /// Wait for the end, and return the whole text.
  std::string text() { return collect().text(); }

  /// Cancel the RPC, if it is running; the reading thread then gets a ClientCancelledError. It can
  /// be called again, and by any thread.
  void cancel() noexcept;

  /// Seed, model and plan of the generation; empty before its first message.
  const std::optional<Started>& started() const;
  /// The end, with statistics; empty until then.
  const std::optional<Finished>& finished() const;
  /// The prompt's tokens, if they were asked for: all of them, once there is a chunk.
  const std::vector<PromptChunk>& prompt_chunks() const;
  /// Everything received so far.
  const std::vector<Chunk>& chunks() const;

 private:
  friend class Client;
  std::shared_ptr<detail::GenerationState> state_;
};

/// A client of one or several orchestrators; any number of threads can use it at once.
///
///     paceline::Client client("127.0.0.1:50050");
///     for (const auto& chunk : client.generate("def fib(n):")) std::cout << chunk.text;
///
/// The client spreads requests over the orchestrators that serve. A generation that one of them
/// leaves unfinished continues at another: under Exact the text is the same.
///
/// A generation keeps the connections, so it may outlive its client.
class Client {
 public:
  /// `address` is HOST:PORT, also with a gRPC scheme, such as dns:///HOST:PORT, or several of them
  /// separated by commas; a name can lead to several, too. Throws InvalidFieldError if one is
  /// malformed, if TLS material is unusable, if metadata cannot be sent, if the timeout is
  /// negative, or if plaintext would leave this machine without `insecure`. Connections themselves
  /// are made by calls.
  explicit Client(const std::string& address, const ClientOptions& options = {});

  /// Continue a prompt. The request is not sent before the result is iterated over or collected.
  /// Throws InvalidFieldError if an option or metadata has a value that cannot be sent, or a time
  /// or number of attempts is negative.
  Generation generate(const Prompt& prompt, const GenerateOptions& options = {},
                      const CallOptions& call = {}) const;

  /// Continue a generation that was left or broken, here or at another orchestrator. Iterating
  /// gives the missing part; collect() and text() give the whole.
  Generation resume(const Generation& generation, const CallOptions& call = {}) const;

  /// Describe the models and servers that the orchestrator works with now. Asks one orchestrator
  /// after the other until one answers.
  SystemInfo info(std::optional<Seconds> timeout = {}, const Metadata& metadata = {}) const;

 private:
  std::shared_ptr<detail::ClientState> state_;
};

}  // namespace paceline

#endif  // PACELINE_CLIENT_HPP_
