// paceline-generate: continue a prompt, and stream the text.

#include <getopt.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <paceline/paceline.hpp>
#include <string>
#include <thread>

namespace {

constexpr int kFailed = 1;
constexpr int kUsageError = 2;
constexpr int kInterrupted = 130;  // 128 + SIGINT, as shells have it

constexpr const char* kUsage =
    R"(usage: paceline-generate [options] PROMPT

Streams the continuation to standard output; the last line, on standard error, has
the numbers of tokens and seconds.

  --address HOST:PORT      the orchestrator (127.0.0.1:50050), or several, with commas
  --max-tokens N           most tokens to generate (the server's default: 256)
  --temperature T          0 is greedy (the server's default)
  --seed S                 the same seed gives the same text; without it one is chosen
  --strategy NAME          auto, autoregressive, speculative, distributed or
                           self_speculative (auto)
  --stop TEXT              end before this text; can be given again
  --ca FILE                connect with TLS and trust this authority
  --certificate FILE --key FILE      the client's own certificate
  --api-key-file FILE      the API key, if the orchestrator requires one
  --insecure               allow plaintext to another machine
  --timeout SECONDS        give up after this time (120)
  --resume-attempts N      how often a broken generation resumes by itself (2)
)";

struct Arguments {
  std::string address = "127.0.0.1:50050";
  std::string prompt;
  paceline::ClientOptions client;
  paceline::GenerateOptions generate;
  paceline::CallOptions call;

  Arguments() { call.resume_attempts = 2; }
};

struct UsageError {
  std::string message;
};

long long integer(const std::string& flag, const std::string& text) {
  long long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw UsageError{"--" + flag + ": '" + text + "' is not a whole number"};
  }
  return value;
}

double number(const std::string& flag, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0') {
    throw UsageError{"--" + flag + ": '" + text + "' is not a number"};
  }
  return value;
}

paceline::Strategy strategy(const std::string& text) {
  const auto value = paceline::from_string<paceline::Strategy>(text);
  if (value == paceline::Strategy::Unknown) {
    throw UsageError{"--strategy: '" + text +
                     "' must be auto, autoregressive, speculative, distributed or self_speculative"};
  }
  return value;
}

// The one key in a file. Other contents are not shown.
std::string key_in(const std::string& name) {
  std::ifstream file(name);
  if (!file) throw UsageError{"--api-key-file: " + name + ": cannot be read"};
  std::string key;
  std::string more;
  if (!(file >> key) || file >> more) {
    throw UsageError{"--api-key-file: " + name +
                     ": must hold one key: printable ASCII without spaces"};
  }
  return key;
}

paceline::Tls& tls(Arguments& arguments) {
  if (!arguments.client.tls) arguments.client.tls.emplace();
  return *arguments.client.tls;
}

void set(Arguments& arguments, const std::string& flag, const std::string& value) {
  if (flag == "address") arguments.address = value;
  if (flag == "max-tokens") arguments.generate.max_tokens = integer(flag, value);
  if (flag == "temperature") arguments.generate.temperature = number(flag, value);
  if (flag == "seed") arguments.generate.seed = integer(flag, value);
  if (flag == "strategy") arguments.generate.strategy = strategy(value);
  if (flag == "stop") arguments.generate.stop.push_back(value);
  if (flag == "ca") tls(arguments).ca_file = value;
  if (flag == "certificate") tls(arguments).certificate_file = value;
  if (flag == "key") tls(arguments).key_file = value;
  if (flag == "api-key-file") {
    arguments.client.token = [key = key_in(value)] { return key; };
  }
  if (flag == "insecure") arguments.client.insecure = true;
  if (flag == "timeout") arguments.client.timeout = paceline::Seconds(number(flag, value));
  if (flag == "resume-attempts") {
    arguments.call.resume_attempts = static_cast<int>(integer(flag, value));
  }
}

// getopt_long says by itself what is wrong with a flag.
Arguments parse(int argc, char** argv) {
  static const option flags[] = {
      {"address", required_argument, nullptr, 0},
      {"max-tokens", required_argument, nullptr, 0},
      {"temperature", required_argument, nullptr, 0},
      {"seed", required_argument, nullptr, 0},
      {"strategy", required_argument, nullptr, 0},
      {"stop", required_argument, nullptr, 0},
      {"ca", required_argument, nullptr, 0},
      {"certificate", required_argument, nullptr, 0},
      {"key", required_argument, nullptr, 0},
      {"api-key-file", required_argument, nullptr, 0},
      {"insecure", no_argument, nullptr, 0},
      {"timeout", required_argument, nullptr, 0},
      {"resume-attempts", required_argument, nullptr, 0},
      {"help", no_argument, nullptr, 'h'},
      {nullptr, 0, nullptr, 0},
  };
  Arguments arguments;
  int index = 0;
  for (int found; (found = getopt_long(argc, argv, "h", flags, &index)) != -1;) {
    if (found == '?') throw UsageError{};
    if (found == 'h') {
      std::cout << kUsage;
      std::exit(0);
    }
    set(arguments, flags[index].name, optarg ? optarg : "");
  }
  if (optind + 1 != argc) throw UsageError{"give one PROMPT"};
  arguments.prompt = argv[optind];
  return arguments;
}

// Turns Ctrl-C into cancel(), for as long as it lives. A signal handler could not call that.
class CancelOnInterrupt {
 public:
  explicit CancelOnInterrupt(paceline::Generation& generation)
      : thread_([this, &generation] {
          int signal = 0;
          sigwait(&signals_, &signal);
          if (!done_) generation.cancel();
        }) {}

  ~CancelOnInterrupt() {
    done_ = true;
    pthread_kill(thread_.native_handle(), SIGINT);
    thread_.join();
  }

  // Before any thread is started, which then all inherit it.
  static void block() {
    const auto signals = interrupt();
    pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  }

 private:
  static sigset_t interrupt() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    return signals;
  }

  const sigset_t signals_ = interrupt();
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

void print_statistics(const paceline::Completion& completion) {
  const auto& finished = completion.finished;
  const auto& statistics = finished.statistics;
  const auto count = finished.usage.completion_token_count - completion.resumed_token_count;
  const double seconds = statistics.total_ns / 1e9;
  std::cerr << count << " tokens in " << seconds << " s · "
            << to_string(completion.started.strategy) << " on " << finished.targets_used
            << " target(s) · " << statistics.target_forward_count << " target forwards · ";
  if (statistics.drafted_token_count > 0) {
    std::cerr << "acceptance " << std::lround(100 * statistics.acceptance_rate) << "% · ";
  }
  std::cerr << "seed " << completion.started.seed << " · ended by "
            << to_string(finished.finish_reason) << '\n';
}

// Ends the line of the text, however its stream ends.
struct LineEnd {
  bool begun = false;
  ~LineEnd() {
    if (begun) std::cout << std::endl;
  }
};

void stream_text(paceline::Generation& stream) {
  LineEnd line;
  for (const auto& chunk : stream) {
    line.begun = true;
    std::cout << chunk.text << std::flush;
  }
}

void generate(const Arguments& arguments) {
  const paceline::Client client(arguments.address, arguments.client);
  auto stream = client.generate(arguments.prompt, arguments.generate, arguments.call);
  const CancelOnInterrupt guard(stream);
  stream_text(stream);
  print_statistics(stream.collect());
}

int fail(const paceline::PacelineError& error) {
  const auto& kind = error.kind();
  const bool needs_key = dynamic_cast<const paceline::UnauthenticatedError*>(&error) != nullptr;
  const auto advice = needs_key ? "--api-key-file names the file with your key" : kind.advice;
  const auto reason = kind.reason.empty() ? kind.code : kind.reason;
  std::cerr << "paceline-generate: " << error.what() << " (" << reason << ")\n"
            << "what to do: " << advice << '\n';
  return kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  CancelOnInterrupt::block();
  std::cerr.precision(3);
  try {
    generate(parse(argc, argv));
  } catch (const UsageError& error) {
    if (!error.message.empty()) std::cerr << "paceline-generate: " << error.message << '\n';
    std::cerr << "paceline-generate --help explains the options\n";
    return kUsageError;
  } catch (const paceline::ClientCancelledError&) {
    return kInterrupted;
  } catch (const paceline::PacelineError& error) {
    return fail(error);
  }
  return 0;
}
