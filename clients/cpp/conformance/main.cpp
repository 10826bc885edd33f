// The C++ client's conformance driver: one JSON request a line in, one JSON answer a line out.
//
// It acts and reports, with the public API alone; it judges nothing.

#include <chrono>
#include <condition_variable>
#include <iostream>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "json.hpp"

namespace conformance {
namespace {

using Clock = std::chrono::steady_clock;
using paceline::Seconds;

Seconds since(Clock::time_point began) { return Clock::now() - began; }

// Cancels a generation after a time, unless it is destroyed before.
class Alarm {
 public:
  Alarm(paceline::Generation& generation, Seconds delay)
      : thread_([this, &generation, delay] {
          std::unique_lock lock(mutex_);
          if (!changed_.wait_for(lock, delay, [this] { return off_; })) generation.cancel();
        }) {}

  ~Alarm() {
    {
      const std::lock_guard lock(mutex_);
      off_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool off_ = false;
  std::thread thread_;  // last: it uses the others
};

// The received data of one stream.
struct Reading {
  Json chunks = Json::array();
  Json events = Json::array();
  std::string text;
  Json error;
  Json first_chunk_seconds;
  bool cancelled = false;

  void add(const paceline::Chunk& chunk, Seconds elapsed) {
    if (chunks.empty()) first_chunk_seconds = elapsed.count();
    chunks.push_back(told(chunk));
    text += chunk.text;
  }

  void add(const paceline::Event& event, Seconds elapsed) {
    if (const auto* chunk = std::get_if<paceline::Chunk>(&event)) return add(*chunk, elapsed);
    events.push_back(told(std::get<paceline::TimelineEvent>(event)));
  }
};

Reading read(paceline::Generation& generation, const Json& request);

// Read a generation a second time, and put that behind what the first reader has.
void read_again(paceline::Generation& generation, Reading& reading) {
  const auto other = read(generation, Json::object());
  for (const auto& chunk : other.chunks) reading.chunks.push_back(chunk);
  reading.text += other.text;
  reading.error = other.error;
}

template <class Range>
void read_range(Range&& range, paceline::Generation& generation, const Json& request,
                const Json& cancel, Reading& reading) {
  const auto began = Clock::now();
  const auto enough = cancel.value("after_chunks", -1);
  const Seconds pause(request.value("pause_seconds", 0.0));
  for (const auto& event : range) {
    reading.add(event, since(began));
    if (static_cast<int>(reading.chunks.size()) == enough) {
      reading.cancelled = true;
      break;
    }
    if (request.value("second_reader", false) && reading.chunks.size() == 1) {
      read_again(generation, reading);
    }
    std::this_thread::sleep_for(pause);
  }
}

Reading read(paceline::Generation& generation, const Json& request) {
  Reading reading;
  const auto cancel = request.value("cancel", Json::object());
  std::unique_ptr<Alarm> alarm;
  if (cancel.contains("after_seconds")) {
    alarm = std::make_unique<Alarm>(generation, Seconds(cancel["after_seconds"].get<double>()));
  }
  try {
    if (request.value("events", false)) {
      read_range(generation.events(), generation, request, cancel, reading);
    } else {
      read_range(generation, generation, request, cancel, reading);
    }
  } catch (const paceline::ClientCancelledError& error) {
    reading.cancelled = !cancel.empty();
    if (cancel.empty()) reading.error = told(error);
  } catch (const paceline::PacelineError& error) {
    reading.error = told(error);
  }
  return reading;
}

Json told(const Reading& reading, const paceline::Generation& generation) {
  Json prompt = Json::array();
  for (const auto& chunk : generation.prompt_chunks()) prompt.push_back(conformance::told(chunk));
  return {{"chunks", reading.chunks},
          {"text", reading.text},
          {"prompt_chunks", prompt},
          {"started", conformance::told(generation.started())},
          {"finished", conformance::told(generation.finished())},
          {"error", reading.error}};
}

// Answers requests, and keeps the clients that they name.
class Driver {
 public:
  Json answer(const Json& request) {
    const auto began = Clock::now();
    Json answer = {{"case", request.value("case", Json())},
                   {"chunks", Json::array()},
                   {"text", ""},
                   {"events", Json::array()},
                   {"started", nullptr},
                   {"finished", nullptr},
                   {"cancelled", false},
                   {"error", nullptr},
                   {"resumed", nullptr},
                   {"system", nullptr},
                   {"first_chunk_seconds", nullptr}};
    try {
      answer.update(act(request));
    } catch (const paceline::PacelineError& error) {
      answer["error"] = conformance::told(error);
    } catch (const Unsupported& why) {
      return {{"case", answer["case"]}, {"unsupported", why.what()}};
    } catch (const Json::exception& why) {
      return {{"case", answer["case"]}, {"unsupported", why.what()}};
    }
    answer["elapsed_seconds"] = since(began).count();
    return answer;
  }

 private:
  Json act(const Json& request) {
    const auto what = request.at("do").get<std::string>();
    if (what == "generate") return generate(request);
    if (what == "system_info") {
      const auto metadata = read_metadata(request, "metadata");
      return {{"system", conformance::told(client(request).info({}, metadata))}};
    }
    if (what == "close") {
      clients_.erase(request.at("client"));
      held_.clear();
      return Json::object();
    }
    throw Unsupported("do " + what);
  }

  Json generate(const Json& request) {
    const auto& client = this->client(request);
    auto& generation = held_.emplace_back(
        client.generate(read_prompt(request.at("prompt")),
                        read_options(request.value("options", Json::object())),
                        read_call(request)));
    const auto reading = read(generation, request);
    auto answer = told(reading, generation);
    answer["events"] = reading.events;
    answer["cancelled"] = reading.cancelled;
    answer["first_chunk_seconds"] = reading.first_chunk_seconds;
    if (request.value("then_resume", false) && (reading.cancelled || !reading.error.is_null())) {
      auto& rest = held_.emplace_back(client.resume(generation));
      const auto rest_reading = read(rest, Json::object());
      answer["resumed"] = told(rest_reading, rest);
    }
    return answer;
  }

  const paceline::Client& client(const Json& request) {
    const auto name = request.at("client").get<std::string>();
    const auto found = clients_.find(name);
    if (found != clients_.end()) return found->second;
    return clients_.try_emplace(name, read_addresses(request), read_client_options(request))
        .first->second;
  }

  std::map<std::string, paceline::Client> clients_;
  std::list<paceline::Generation> held_;  // a destructor must not be what cancels one
};

}  // namespace
}  // namespace conformance

int main() {
  conformance::Driver driver;
  for (std::string line; std::getline(std::cin, line);) {
    const auto request = conformance::Json::parse(line, nullptr, false);
    const auto answer = request.is_object()
                            ? driver.answer(request)
                            : conformance::Json{{"unsupported", "the line is no JSON object"}};
    std::cout << answer << std::endl;
  }
}
