// Expecting a call to be refused with a message.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "dualkv/dualkv.h"

namespace dualkv::testing {

// `status` is that of a call that has just failed, with all of `parts` in its message.
inline void ExpectError(dualkv_status status, dualkv_status expected,
                        std::initializer_list<const char*> parts) {
  EXPECT_EQ(status, expected);
  for (const char* part : parts) {
    EXPECT_THAT(std::string(dualkv_last_error()), ::testing::HasSubstr(part));
  }
}

inline void ExpectInvalid(dualkv_status status, std::initializer_list<const char*> parts) {
  ExpectError(status, DUALKV_INVALID_ARGUMENT, parts);
}

}  // namespace dualkv::testing
