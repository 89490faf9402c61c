// CUDA as seen by a CPU build of torch: eight devices on which nothing is allocated or computed.
//
// FakeTensors carry no data, but torch still asks the backend of their device for streams, events,
// generators and pinned memory: the device guard and the hooks below answer. Loaded before torch
// caches that there is no CUDA, see guard.py.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kNumDevices = 8;
// Per thread, as in CUDA: the autograd engine has a thread for each device.
thread_local c10::DeviceIndex selected = 0;

c10::DeviceIndex select(c10::DeviceIndex index) {
  const c10::DeviceIndex before = selected;
  if (index >= 0) {
    selected = index;
  }
  return before;
}

c10::Stream the_stream(c10::Device device) {
  const auto index = device.index() < 0 ? selected : device.index();
  return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, index));
}

struct NoOpGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;

  NoOpGuard() = default;
  explicit NoOpGuard(c10::DeviceType) {}

  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Device getDevice() const override { return c10::Device(static_type, selected); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(static_type, select(device.index()));
  }
  void setDevice(c10::Device device) const override { select(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { select(device.index()); }

  c10::Stream getStream(c10::Device device) const override { return the_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return the_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return the_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    *event = nullptr;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, NoOpGuard)

// torch looks the hooks up by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex current_device() const override { return selected; }
  c10::DeviceIndex getCurrentDevice() const override { return selected; }
  void setCurrentDevice(c10::DeviceIndex index) const override { select(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return select(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return select(index);
  }

  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return true; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace
