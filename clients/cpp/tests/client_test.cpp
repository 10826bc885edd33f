// The client against a scripted server in this process. ctest ends what hangs.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>
#include <paceline/paceline.hpp>

#include <cstdio>
#include <fstream>
#include <future>
#include <stdexcept>
#include <thread>

#include "scripted_server.hpp"

namespace paceline {
namespace {

constexpr int kUnavailable = 14;
constexpr int kInternal = 13;
constexpr int kDeadlineExceeded = 4;
const std::string kWholeText = "3 4 5 6 7 ";

Leg breaks_after(int chunks, int code = kUnavailable) {
  Leg leg;
  leg.chunks = chunks;
  leg.code = code;
  return leg;
}

Leg hangs_after(int chunks) {
  Leg leg;
  leg.chunks = chunks;
  leg.hangs = true;
  return leg;
}

Leg says_nothing() {
  Leg leg;
  leg.hangs = leg.omits_start = true;
  return leg;
}

TEST(Client, StreamsChunksBetweenStartedAndFinished) {
  ScriptedServer server;
  const Client client(server.address());
  auto generation = client.generate("x");
  EXPECT_FALSE(generation.started());
  std::string text;
  for (const auto& chunk : generation) {
    EXPECT_TRUE(generation.started());
    text += chunk.text;
  }
  EXPECT_EQ(text, kWholeText);
  EXPECT_EQ(generation.finished()->usage.completion_token_count, 5);
}

TEST(Client, SendsNothingBeforeItIsReadAndOnlyOnce) {
  ScriptedServer server;
  const Client client(server.address());
  auto generation = client.generate("x");
  EXPECT_TRUE(server.requests().empty());
  EXPECT_EQ(generation.text(), kWholeText);
  EXPECT_EQ(generation.text(), kWholeText);
  EXPECT_EQ(server.requests().size(), 1u);
}

TEST(Client, TellsOfTimelineEventsAmongTheChunks) {
  ScriptedServer server;
  GenerateOptions options;
  options.stream_timeline = true;
  auto generation = Client(server.address()).generate("x", options);
  std::size_t chunks = 0;
  std::size_t events = 0;
  for (const auto& event : generation.events()) {
    ++(std::holds_alternative<Chunk>(event) ? chunks : events);
  }
  EXPECT_EQ(chunks, 5u);
  EXPECT_EQ(events, 5u);
}

TEST(Client, CancelsTheCallWhenTheLoopIsLeft) {
  ScriptedServer server({hangs_after(2)});
  const Client client(server.address());
  auto generation = client.generate("x");
  for (const auto& chunk : generation) {
    if (chunk.position == 4) break;
  }
  server.wait_for_cancelled(1);
  EXPECT_EQ(generation.chunks().size(), 2u);
  EXPECT_EQ(generation.text(), kWholeText);  // goes on where it was
  EXPECT_EQ(server.requests().at(1).resume_token_ids_size(), 2);
}

TEST(Client, CancelsTheCallWhenAnExceptionLeavesTheLoop) {
  ScriptedServer server({hangs_after(1)});
  const Client client(server.address());
  EXPECT_THROW(
      {
        for ([[maybe_unused]] const auto& chunk : client.generate("x")) throw 1;
      },
      int);
  server.wait_for_cancelled(1);
}

TEST(Client, IsCancelledByAnotherThreadBeforeTheFirstMessage) {
  ScriptedServer server({says_nothing()});
  auto generation = Client(server.address()).generate("x");
  auto reading = std::async(std::launch::async, [&] { return generation.text(); });
  server.wait_for_requests(1);
  generation.cancel();
  EXPECT_THROW(reading.get(), ClientCancelledError);
  server.wait_for_cancelled(1);
}

TEST(Client, IsCancelledByAnotherThreadInMidStream) {
  ScriptedServer server({hangs_after(1)});
  const Client client(server.address());
  auto generation = client.generate("x");
  std::promise<void> received;
  auto reading = std::async(std::launch::async, [&] {
    for ([[maybe_unused]] const auto& chunk : generation) received.set_value();
  });
  received.get_future().wait();
  generation.cancel();
  EXPECT_THROW(reading.get(), ClientCancelledError);
  EXPECT_THROW(generation.text(), ClientCancelledError);
  EXPECT_EQ(client.resume(generation).text(), kWholeText);
}

TEST(Client, RefusesASecondReaderAndLetsTheFirstGoOn) {
  ScriptedServer server({hangs_after(1)});
  const Client client(server.address());
  auto generation = client.generate("x");
  {
    const auto first = generation.begin();
    EXPECT_EQ(first->text, "3 ");
    EXPECT_THROW(generation.text(), InvalidFieldError);
  }
  server.wait_for_cancelled(1);
  EXPECT_EQ(generation.text(), kWholeText);
}

TEST(Client, IsCancelledWhileItWaitsToGoOn) {
  ScriptedServer server(std::deque<Leg>(1000, breaks_after(0)));
  auto generation = Client(server.address()).generate("x", {}, {Seconds(1000), 1000});
  auto reading = std::async(std::launch::async, [&] { return generation.text(); });
  server.wait_for_requests(3);
  generation.cancel();
  EXPECT_THROW(reading.get(), ClientCancelledError);
}

// Accepts connections, and never says a word.
class SilentPeer {
 public:
  SilentPeer() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    bind(listener_, reinterpret_cast<sockaddr*>(&address), size);
    listen(listener_, 1);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    address_ = "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  }
  ~SilentPeer() {
    close(connection_);
    close(listener_);
  }
  const std::string& address() const { return address_; }
  void wait_for_connection() { connection_ = accept(listener_, nullptr, nullptr); }

 private:
  int listener_ = socket(AF_INET, SOCK_STREAM, 0);
  int connection_ = -1;
  std::string address_;
};

TEST(Client, IsCancelledWhileItConnects) {
  SilentPeer peer;
  auto generation = Client(peer.address()).generate("x");
  auto reading = std::async(std::launch::async, [&] { return generation.text(); });
  peer.wait_for_connection();
  generation.cancel();
  EXPECT_THROW(reading.get(), ClientCancelledError);
}

TEST(Client, SendsNothingOnceItIsCancelled) {
  ScriptedServer server;
  auto generation = Client(server.address()).generate("x");
  generation.cancel();
  generation.cancel();
  EXPECT_THROW(generation.text(), ClientCancelledError);
  EXPECT_TRUE(server.requests().empty());
}

TEST(Client, GoesOnByItselfWithoutAGapOrADuplicate) {
  ScriptedServer server({breaks_after(2), breaks_after(0), breaks_after(1)});
  auto generation = Client(server.address()).generate("x", {}, {Seconds(60), 3});
  std::string text;
  for (const auto& chunk : generation) text += chunk.text;
  EXPECT_EQ(text, kWholeText);
  EXPECT_EQ(server.requests().at(3).resume_token_ids_size(), 3);
  EXPECT_EQ(server.requests().at(3).seed(), 7u);
  EXPECT_EQ(generation.collect().resumed_token_count, 3);
}

TEST(Client, GoesOnOnlyAsOftenAsItMay) {
  ScriptedServer server({breaks_after(1), breaks_after(1)});
  EXPECT_THROW(Client(server.address()).generate("x", {}, {{}, 1}).text(), ConnectionLostError);
  EXPECT_EQ(server.requests().size(), 2u);
}

TEST(Client, DoesNotTryAgainWhatCannotBetter) {
  ScriptedServer server({breaks_after(1, kInternal)});
  EXPECT_THROW(Client(server.address()).generate("x", {}, {{}, 9}).text(), InternalError);
  EXPECT_EQ(server.requests().size(), 1u);
}

TEST(Client, ResumesABrokenGenerationByHand) {
  ScriptedServer server({breaks_after(2)});
  const Client client(server.address());
  auto broken = client.generate("x");
  EXPECT_THROW(broken.text(), ConnectionLostError);
  auto rest = client.resume(broken);
  std::string missing;
  for (const auto& chunk : rest) missing += chunk.text;
  EXPECT_EQ(missing, "5 6 7 ");
  EXPECT_EQ(rest.text(), kWholeText);
  EXPECT_EQ(broken.chunks().size(), 2u);
}

TEST(Client, GoesOnAtAnotherByItselfUnlessToldOtherwise) {
  for (const bool may : {true, false}) {
    ScriptedServer one({breaks_after(2)});
    ScriptedServer other({breaks_after(2)});
    const Client client(one.address() + "," + other.address());
    CallOptions call;
    if (may) {
      EXPECT_EQ(client.generate("x", {}, call).text(), kWholeText);
    } else {
      call.resume_attempts = 0;
      EXPECT_THROW(client.generate("x", {}, call).text(), ConnectionLostError);
    }
    EXPECT_EQ(one.requests().size() + other.requests().size(), may ? 3u : 1u);
  }
}

TEST(Client, LeavesABrokenStreamOfItsOnlyOrchestratorToTheCaller) {
  ScriptedServer server({breaks_after(2)});
  EXPECT_THROW(Client(server.address()).generate("x").text(), ConnectionLostError);
  EXPECT_EQ(server.requests().size(), 1u);
}

TEST(Client, AsksTheNextOneWhereNobodyListens) {
  const std::string nobody = "127.0.0.1:1";
  ScriptedServer server;
  for (const auto& addresses : {nobody + "," + server.address(), server.address() + "," + nobody}) {
    EXPECT_EQ(Client(addresses).info(Seconds(60)).servers.at(0).name, "target-0");
    EXPECT_EQ(Client(addresses).generate("x").text(), kWholeText);
  }
}

TEST(Client, ThrowsWhatItsTokenThrowsAndCanBeReadAgain) {
  ScriptedServer server;
  ClientOptions options;
  options.token = [calls = 0]() mutable -> std::string {
    if (calls++ == 0) throw std::domain_error("no token");
    return "t";
  };
  auto generation = Client(server.address(), options).generate("x");
  EXPECT_THROW(generation.text(), std::domain_error);
  EXPECT_EQ(generation.text(), kWholeText);
}

TEST(Client, RefusesMetadataThatCannotBeSent) {
  CallOptions call;
  call.metadata = {{"a b", "x"}};
  EXPECT_THROW(Client("127.0.0.1:1").generate("x", {}, call), InvalidFieldError);
  EXPECT_THROW(Client("127.0.0.1:1").info({}, call.metadata), InvalidFieldError);
}

TEST(Client, RefusesToGoOnWithAnotherModel) {
  Leg other;
  other.fingerprint = "model-b";
  ScriptedServer server({breaks_after(2), other});
  EXPECT_THROW(Client(server.address()).generate("x", {}, {{}, 1}).text(), ModelMismatchError);
}

TEST(Client, ReportsAStreamWithoutItsLastMessage) {
  ScriptedServer server({breaks_after(2, 0)});
  EXPECT_THROW(Client(server.address()).generate("x").text(), InvariantViolatedError);
}

TEST(Client, KeepsAWholeAnswerWhateverComesAfterIt) {
  ScriptedServer server({breaks_after(5, kInternal)});
  EXPECT_EQ(Client(server.address()).generate("x").text(), kWholeText);
}

TEST(Client, GivesUpAtTheDeadline) {
  ScriptedServer server({hangs_after(1), breaks_after(0, kDeadlineExceeded)});
  const Client client(server.address());
  auto generation = client.generate("x", {}, {Seconds(0.2), 9});
  EXPECT_THROW(generation.text(), DeadlineError);
  EXPECT_THROW(client.generate("x", {}, {Seconds(0)}).text(), DeadlineError);
  EXPECT_THROW(client.generate("x", {}, {Seconds(-1)}), InvalidFieldError);
}

TEST(Client, DescribesTheSystem) {
  ScriptedServer server;
  EXPECT_EQ(Client(server.address()).info().servers.at(0).name, "target-0");
}

TEST(Client, SaysThatNobodyListens) {
  const SilentPeer never_served;
  EXPECT_THROW(Client("127.0.0.1:1").info(Seconds(10)), ConnectionLostError);
}

TEST(Client, RefusesPlaintextToAnotherMachineBeforeItDials) {
  EXPECT_THROW(Client("192.0.2.1:1"), InvalidFieldError);
}

TEST(Client, NamesTheTlsFileThatCannotBeRead) {
  ClientOptions options;
  const auto expect_violation = [&](const std::string& field) {
    try {
      Client("127.0.0.1:1", options);
      ADD_FAILURE() << "accepted";
    } catch (const InvalidFieldError& error) {
      EXPECT_EQ(error.violations().at(0).field, field);
    }
  };
  options.tls.emplace().ca_file = "/does/not/exist";
  expect_violation("tls.ca_file");
  options.tls->ca_file = "/";
  expect_violation("tls.ca_file");
  options.tls->ca_file = "/dev/null";
  expect_violation("tls.ca_file");
  options.tls.emplace().certificate_file = "/does/not/exist";
  expect_violation("tls");
  options.tls.emplace().ca = "";
  expect_violation("tls.ca");
  options.tls->ca_file = "/dev/null";
  expect_violation("tls.ca_file");
}

TEST(Client, MayBeGoneWhileItsGenerationIsRead) {
  ScriptedServer server;
  auto generation = Client(server.address()).generate("x");
  auto moved = std::move(generation);
  EXPECT_EQ(moved.text(), kWholeText);
}

TEST(Client, IsSharedByThreads) {
  ScriptedServer server;
  const Client client(server.address());
  std::vector<std::future<std::string>> texts;
  for (int index = 0; index < 8; ++index) {
    texts.push_back(std::async(std::launch::async, [&] { return client.generate("x").text(); }));
  }
  for (auto& text : texts) EXPECT_EQ(text.get(), kWholeText);
}

}  // namespace
}  // namespace paceline
