#include <cstdio>
#include <iostream>
#include <paceline/paceline.hpp>

int main() try {
  paceline::Client client("127.0.0.1:50050");
  paceline::GenerateOptions options;
  options.max_tokens = 64;
  auto stream = client.generate("def fibonacci(n):", options);
  for (const auto& chunk : stream) std::cout << chunk.text << std::flush;
  std::printf("\nacceptance %.0f%%\n", 100 * stream.finished()->statistics.acceptance_rate);
} catch (const paceline::PacelineError& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
