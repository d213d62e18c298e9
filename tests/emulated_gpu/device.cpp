// CUDA devices whose memory is the host's and whose kernels are the CPU's, for a CPU build of PyTorch.
//
// Their tensors are as apart from the CPU's as those of a GPU: an operator that mixes devices is refused where CUDA
// would refuse it, and a thread that has not chosen a device is on the first. Every call is done when it returns, so
// nothing here shows a missing wait between streams.
//
// Load it before torch is imported: torch asks once which devices there are.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

using namespace c10;

namespace {

constexpr auto GPU = DeviceType::CUDA;
constexpr int MAX_DEVICES = 8;
std::atomic<int64_t> allocated[MAX_DEVICES], peak[MAX_DEVICES];
thread_local DeviceIndex current = 0;

DeviceIndex count = 0;

struct Block {
  void* data;
  int64_t size;
  DeviceIndex device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated[block->device] -= block->size;
  std::free(block->data);
  delete block;
}

struct Memory final : Allocator {
  DataPtr allocate(size_t size) override {
    void* data = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    auto* block = new Block{data, (int64_t)size, current};
    int64_t now = allocated[current] += block->size;
    int64_t seen = peak[current];
    while (now > seen && !peak[current].compare_exchange_weak(seen, now)) {
    }
    return {block->data, block, &release, Device(GPU, current)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
const DispatchKeySet KEYS(DispatchKey::CUDA);

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return GPU; }
  Device getDevice() const override { return Device(GPU, current); }
  Device exchangeDevice(Device device) const override {
    Device before(GPU, current);
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < count, "CUDA error: invalid device ordinal");
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, Device(GPU, device.index() < 0 ? current : device.index()));
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return count; }
  // Whatever was asked of a device is done when the call returns.
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

/// A generator of a device, which draws what the CPU's draws.
struct DeviceGenerator final : GeneratorImpl {
  at::Generator cpu;
  DeviceGenerator(DeviceIndex device, at::Generator cpu)
      : GeneratorImpl(Device(GPU, device), KEYS), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(cpu).seed(); }
  void set_state(const TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  intrusive_ptr<TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), cpu.clone()); }
};

}  // namespace

// The registry finds it by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return count > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return count; }
  int getNumGPUs() const override { return count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current : exchangeDevice(device);
  }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &memory; }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    auto cpu = at::make_generator<at::CPUGeneratorImpl>();
    return at::make_generator<DeviceGenerator>(device < 0 ? current : device, cpu);
  }
  void deviceSynchronize(DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

namespace {

struct OnDevice {
  DeviceIndex before;
  explicit OnDevice(DeviceIndex device) : before(current) {
    if (device >= 0) current = device;
  }
  ~OnDevice() { current = before; }
};

/// The same memory as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      at::TensorOptions().dtype(tensor.dtype()).device(kCPU));
}

bool is_gpu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == GPU; }

at::Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<MemoryFormat> format) {
  OnDevice on(device ? device->index() : -1);
  return at::detail::empty_generic(size, &memory, KEYS, dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  OnDevice on(device ? device->index() : -1);
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, dtype_or_default(dtype));
}

at::Tensor view_of(const at::Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  auto result =
      at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(self.storage()), self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return result;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  auto to = is_gpu(self) ? on_cpu(self) : self;
  to.copy_(is_gpu(source) ? on_cpu(source) : source);
  return self;
}

const at::Tensor& resize_(const at::Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) {
    OnDevice on(self.device().index());
    auto fresh = memory.allocate(needed);
    std::memcpy(fresh.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr(std::move(fresh));
    self.storage().set_nbytes(needed);
  }
  return self;
}

at::Tensor& set_(at::Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_storage(at::Tensor& self, Storage source) {
  int64_t size = source.nbytes() / self.itemsize();
  return set_(self, std::move(source), 0, {size}, {1});
}

at::Tensor& set_nothing(at::Tensor& self) {
  OnDevice on(self.device().index());
  return set_(self, Storage(Storage::use_byte_size_t(), 0, &memory, true), 0, {0}, {1});
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return on_cpu(self).item(); }

/// The same value with `change` of each of its tensors: it is one, or a list of them, or a list of lists.
template <class Change>
IValue each(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    List<at::Tensor> list;
    for (const auto& one : value.toTensorVector()) list.push_back(change(one));
    return list;
  }
  if (value.isList() && value.toListRef().size() && value.toListRef()[0].isTensorList()) {
    List<List<at::Tensor>> lists;
    for (const auto& inner : value.toListRef()) lists.push_back(each(inner, change).toTensorList());
    return lists;
  }
  return value;
}

/// One call's tensors: which of the GPU's became which of the CPU's.
struct Call {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // the GPU's, the CPU's
  Device device{GPU, -1};
  bool has_cpu = false;
  std::string foreign;

  at::Tensor lower(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_gpu(tensor)) {
      if (tensor.dim() > 0) has_cpu = true;
      return tensor;
    }
    if (device.index() >= 0 && device != tensor.device()) foreign = tensor.device().str();
    device = tensor.device();
    for (auto& [gpu, cpu] : pairs)
      if (gpu.is_same(tensor)) return cpu;
    // An operator may resize what it writes to, if that is empty: borrowed memory cannot be.
    auto cpu = tensor.numel() ? on_cpu(tensor) : at::empty(tensor.sizes(), tensor.options().device(kCPU));
    pairs.emplace_back(tensor, cpu);
    return pairs.back().second;
  }

  IValue lower(const IValue& value) {
    if (value.isDevice() && value.toDevice().type() == GPU) {
      if (device.index() < 0) device = Device(GPU, value.toDevice().has_index() ? value.toDevice().index() : current);
      return Device(kCPU);
    }
    if (value.isGenerator() && value.toGenerator().device().type() != GPU) has_cpu = true;
    if (value.isGenerator() && value.toGenerator().device().type() == GPU)
      return static_cast<DeviceGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())->cpu;
    if (value.isOptionalTensorList()) {
      List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
        list.push_back(one ? std::optional<at::Tensor>(lower(*one)) : std::nullopt);
      return list;
    }
    return each(value, [this](const at::Tensor& one) { return lower(one); });
  }

  at::Tensor raise(const at::Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    for (auto& [gpu, lowered] : pairs) {
      if (cpu.is_same(lowered)) {
        if (cpu.sizes() != gpu.sizes()) {  // an ``out`` that was resized
          resize_(gpu, cpu.sizes(), std::nullopt);
          on_cpu(gpu).copy_(cpu);
        }
        return gpu;
      }
    }
    for (auto& [gpu, lowered] : pairs) {
      if (lowered.has_storage() && cpu.is_alias_of(lowered)) {
        auto offset = gpu.storage_offset() + cpu.storage_offset() - lowered.storage_offset();
        return view_of(gpu, cpu.sizes(), cpu.strides(), offset);
      }
    }
    OnDevice on(device.index());
    at::Tensor result =
        at::detail::empty_strided_generic(cpu.sizes(), cpu.strides(), &memory, KEYS, cpu.scalar_type());
    on_cpu(result).copy_(cpu);
    return result;
  }

  IValue raise(const IValue& value) {
    return each(value, [this](const at::Tensor& one) { return raise(one); });
  }
};

/// Operators of CUDA that take indices from the host.
const std::set<std::string> TAKE_HOST_INDICES = {
    "aten::index",           "aten::index_put",          "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index",   "aten::_unsafe_index_put",
};

void on_the_cpu(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call;
  const auto begin = stack->size() - schema.arguments().size();
  for (size_t i = begin; i < stack->size(); ++i) (*stack)[i] = call.lower((*stack)[i]);
  const auto& name = schema.name();
  if (call.device.index() >= 0) {
    const auto mixes_cpu = call.has_cpu && !TAKE_HOST_INDICES.count(name);
    const std::string other = mixes_cpu ? "cpu" : call.foreign;
    TORCH_CHECK(
        other.empty(), name, ": Expected all tensors to be on the same device, but found at least two devices, ",
        call.device, " and ", other, "!");
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  const auto num_returns = schema.returns().size();
  for (size_t i = stack->size() - num_returns; i < stack->size(); ++i) (*stack)[i] = call.raise((*stack)[i]);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &view_of);
  m.impl("copy_", &copy_);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  // PyTorch has one kernel of these for all devices, which then looks for a CUDA library.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

// The same memory as a tensor of the CPU.
TORCH_LIBRARY(emulated_gpu, m) { m.def("on_cpu(Tensor(a) tensor) -> Tensor(a)"); }
TORCH_LIBRARY_IMPL(emulated_gpu, CUDA, m) { m.impl("on_cpu", &on_cpu); }

/// Give this process so many of these devices.
extern "C" void emulated_install(int devices) {
  count = static_cast<DeviceIndex>(std::min(devices, MAX_DEVICES));
  static Guard guard;
  impl::device_guard_impl_registry[static_cast<size_t>(GPU)].store(&guard);
}

/// Let collectives of these devices' tensors run on the CPU's backend. Call it once torch is imported.
extern "C" void emulated_collectives() {
  // PyTorch warns of a kernel that takes another's place, which is what is wanted.
  struct : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static auto* library = new torch::Library(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const char* name :
       {"_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "allreduce_", "allreduce_coalesced_", "alltoall_", "alltoall_base_",
        "barrier", "broadcast_", "gather_", "recv_", "recv_any_source_", "reduce_", "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_", "scatter_", "send"})
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

extern "C" int64_t emulated_allocated(int device) { return allocated[device]; }
extern "C" int64_t emulated_peak(int device) { return peak[device]; }
extern "C" void emulated_reset_peak(int device) { peak[device] = allocated[device].load(); }
extern "C" int emulated_device() { return current; }
extern "C" void emulated_set_device(int device) { current = static_cast<DeviceIndex>(device); }
