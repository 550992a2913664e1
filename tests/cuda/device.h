// What tests of the CUDA backend share.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace dualkv::testing {

inline void CheckCuda(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(cudaGetErrorString(error));
  }
}

// Skips tests where there is no GPU that the kernels are compiled for.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0, major = 0, minor = 0;
    if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0) {
      CheckCuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
      CheckCuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    }
    if (major != 9 || minor != 0) {
      GTEST_SKIP() << "needs a GPU of compute capability 9.0";
    }
  }
};

// An array in device memory.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& host) : count_(host.size()) {
    CheckCuda(cudaMalloc(&data_, count_ * sizeof(T)));
    CheckCuda(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() { return data_; }
  size_t bytes() const { return count_ * sizeof(T); }
  std::vector<T> ToHost() const {
    std::vector<T> host(count_);
    CheckCuda(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

}  // namespace dualkv::testing
