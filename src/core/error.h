// Errors inside the library: thrown as exceptions, turned into status codes at the C boundary
// (src/api/guard.h).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace dualkv::core {

// The caller's mistake. The message names the argument and its value.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A valid request that this build or this device cannot serve.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Throws InvalidArgument with the concatenated parts unless `condition` holds.
template <class... Parts>
void Require(bool condition, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    throw InvalidArgument(Concat(parts...));
  }
}

}  // namespace dualkv::core
