// The C boundary: no exception leaves the library, and its message is kept for dualkv_last_error().
#pragma once

#include <new>
#include <string>

#include "core/error.h"
#include "dualkv/dualkv.h"

namespace dualkv::api {

// The message behind dualkv_last_error(), one for each thread.
void SetLastError(const std::string& message) noexcept;
const std::string& LastError() noexcept;

// Runs `body` and turns what it throws into a status.
template <class Body>
dualkv_status Guard(Body&& body) noexcept {
  try {
    body();
    return DUALKV_OK;
  } catch (const core::InvalidArgument& error) {
    SetLastError(error.what());
    return DUALKV_INVALID_ARGUMENT;
  } catch (const core::Unsupported& error) {
    SetLastError(error.what());
    return DUALKV_UNSUPPORTED;
  } catch (const std::bad_alloc&) {
    SetLastError("out of host memory");
    return DUALKV_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    SetLastError(error.what());
    return DUALKV_INTERNAL;
  }
}

template <class T>
void RequirePointer(const T* pointer, const char* name) {
  core::Require(pointer != nullptr, name, " must not be NULL");
}

// Checks the two leading fields of a parameter struct.
template <class Struct>
void RequireStruct(const Struct* value, const char* name) {
  RequirePointer(value, name);
  core::Require(value->version == DUALKV_ABI_VERSION, name, ".version must be ", DUALKV_ABI_VERSION, ", got ",
                value->version);
  core::Require(value->size == sizeof(Struct), name, ".size must be ", sizeof(Struct), ", got ", value->size);
}

}  // namespace dualkv::api
