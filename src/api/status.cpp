// Errors and versions of the C interface.
#include <string>

#include "api/guard.h"
#include "dualkv/dualkv.h"

namespace dualkv::api {
namespace {
thread_local std::string last_error;
}  // namespace

void SetLastError(const std::string& message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();  // no memory for the message
  }
}

const std::string& LastError() noexcept { return last_error; }

}  // namespace dualkv::api

const char* dualkv_last_error(void) { return dualkv::api::LastError().c_str(); }
const char* dualkv_version(void) { return DUALKV_VERSION; }
uint32_t dualkv_abi_version(void) { return DUALKV_ABI_VERSION; }
