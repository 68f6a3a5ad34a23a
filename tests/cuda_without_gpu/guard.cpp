// A CUDA that has one device and does nothing, for builds of PyTorch without CUDA: with it, tensors without
// data of CUDA get through a backward.  Loaded before PyTorch is.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace {

struct OneDevice final : public c10::impl::DeviceGuardImplInterface {
  c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> fake;

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return fake.exchangeDevice(device); }
  c10::Device getDevice() const override { return fake.getDevice(); }
  void setDevice(c10::Device device) const override { fake.setDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { fake.uncheckedSetDevice(device); }
  c10::Stream getStream(c10::Device device) const override { return fake.getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return fake.exchangeStream(stream); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace
