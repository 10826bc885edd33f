#include "address.hpp"

#include <gtest/gtest.h>

#include "paceline/errors.hpp"

namespace paceline::detail {
namespace {

TEST(Address, IsLoopbackWhereEveryEndpointIsOnThisMachine) {
  for (const auto* address :
       {"127.0.0.1:1", "127.9.9.9:1", "localhost:65535", "[::1]:1", "unix:/tmp/socket",
        "unix-abstract:name", "dns:///localhost:1", "dns://8.8.8.8/localhost:1",
        "ipv4:127.0.0.1:1,127.0.0.2:1", "ipv6:[::1]:1", "passthrough:///127.0.0.1:1"}) {
    EXPECT_TRUE(is_loopback(address)) << address;
  }
}

TEST(Address, IsNotLoopbackWhereAnEndpointIsElsewhereOrCouldBe) {
  for (const auto* address :
       {"10.0.0.1:1", "example.org:1", "127.0.0.1.example.org:1", "[::2]:1",
        "ipv4:127.0.0.1:1,10.0.0.1:1", "dns:///example.org:1", "0.0.0.0:1", "xds:///localhost:1"}) {
    EXPECT_FALSE(is_loopback(address)) << address;
  }
}

TEST(Address, IsRefusedWithoutAHostOrAPort) {
  for (const auto* address : {"", "localhost", ":1", "localhost:", "localhost:65536", "localhost:x",
                              "localhost:-1", "ipv4:127.0.0.1:1,127.0.0.1"}) {
    EXPECT_THROW(is_loopback(address), InvalidFieldError) << address;
  }
}

TEST(Address, IsOneOfThoseBetweenTheCommas) {
  using List = std::vector<std::string>;
  EXPECT_EQ(listed("10.0.0.1:1"), List{"10.0.0.1:1"});
  EXPECT_EQ(listed("10.0.0.1:1, [::1]:2"), (List{"10.0.0.1:1", "[::1]:2"}));
  EXPECT_EQ(listed("ipv4:10.0.0.1:1,10.0.0.2:1"), List{"ipv4:10.0.0.1:1,10.0.0.2:1"});
  EXPECT_THROW(is_loopback(listed("127.0.0.1:1,").at(1)), InvalidFieldError);
}

TEST(Address, LeadsToOneServerWhereItIsASocketOrOneIp) {
  for (const auto* address : {"127.0.0.1:1", "localhost:1", "[::1]:1", "10.0.0.1:1", "unix:/tmp/x",
                              "dns:///10.0.0.1:1"}) {
    EXPECT_TRUE(leads_to_one(address)) << address;
  }
  for (const auto* address :
       {"paceline.example:1", "dns:///paceline.example:1", "ipv4:10.0.0.1:1,10.0.0.2:1"}) {
    EXPECT_FALSE(leads_to_one(address)) << address;
  }
}

TEST(Address, MayLeaveThisMachineWithTlsOrWhenSaidInsecure) {
  EXPECT_NO_THROW(check_address("10.0.0.1:1", true, false));
  EXPECT_NO_THROW(check_address("10.0.0.1:1", false, true));
  EXPECT_NO_THROW(check_address("127.0.0.1:1", false, false));
  try {
    check_address("10.0.0.1:1", false, false);
    FAIL() << "plaintext was allowed";
  } catch (const InvalidFieldError& error) {
    EXPECT_EQ(error.violations().at(0).field, "address");
  }
}

}  // namespace
}  // namespace paceline::detail
