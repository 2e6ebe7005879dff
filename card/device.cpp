// A CUDA device whose memory is the host's and whose ops run on the CPU, for a torch without CUDA.
//
// It is built twice. With PRELOADED it holds what torch asks while it is being imported. Without,
// it is the Python module card_device: memory, streams, ops, collectives, and what is counted.
#ifdef PRELOADED
#include <ATen/detail/CUDAHooksInterface.h>

// at::accelerator::getAccelerator(bool) -> std::optional<DeviceType>: there is one, CUDA (1).
extern "C" unsigned short _ZN2at11accelerator14getAcceleratorEb(bool) { return 0x0101; }

namespace {
struct Hooks final : at::CUDAHooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  void init() const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
};
}  // namespace

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const Hooks hooks;
  return hooks;
}
}  // namespace at::detail

#else
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <malloc.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>

namespace {
using namespace c10;
const Device card(DeviceType::CUDA, 0);
const Device host(DeviceType::CPU);

// ---- What is counted ----

std::atomic<long> syncs{0}, allocated{0}, peak{0};
std::atomic<long> launches{0};  // of ops; the kernels that Inductor generates are not in it
bool warn_of_syncs = false;

void count_sync(const char* what) {
  ++syncs;
  if (warn_of_syncs) TORCH_WARN("called a synchronizing CUDA operation: ", what);
}

// ---- Memory: fresh memory holds NaN, so that a read of what nobody wrote shows ----

struct HostAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &raw_free, card};
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 256, bytes) == 0, "out of memory: ", bytes, " bytes");
    std::memset(memory, 0xFF, bytes);
    const long now = allocated += malloc_usable_size(memory);
    if (now > peak) peak = now;
    return {memory, memory, &raw_free, card};
  }
  static void raw_free(void* memory) {
    allocated -= malloc_usable_size(memory);
    std::free(memory);
  }
  DeleterFnPtr raw_deleter() const override { return &raw_free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
HostAllocator allocator;
REGISTER_ALLOCATOR(DeviceType::CUDA, &allocator);

// ---- Streams: numbers. Everything runs at once, in the order of the host ----

thread_local StreamId current = 0;
std::atomic<StreamId> next_stream{8};

Stream stream(StreamId id) { return Stream(Stream::UNSAFE, card, id); }

struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return card; }
  Device getDevice() const override { return card; }
  Stream getStream(Device) const noexcept override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(next_stream++); }
  Stream getNewStream(Device, int) const override { return stream(next_stream++); }
  Stream exchangeStream(Stream next) const noexcept override {
    return stream(std::exchange(current, next.id()));
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());

// ---- The same memory as a tensor of the other device ----

at::Tensor on(const at::Tensor& tensor, Device device) {
  const auto key = device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
  Allocator* owner = device.is_cuda() ? &allocator : GetAllocator(DeviceType::CPU);
  const auto& storage = tensor.storage();
  DataPtr data(storage.mutable_data(), new at::Tensor(tensor),
               [](void* kept) { delete static_cast<at::Tensor*>(kept); }, device);
  Storage shared(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), owner, true);
  auto out = at::detail::make_tensor<TensorImpl>(
      std::move(shared), DispatchKeySet(key), tensor.dtype());
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return out;
}
bool is_card(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }
at::Tensor on_host(const at::Tensor& tensor) { return is_card(tensor) ? on(tensor, host) : tensor; }

IValue moved(const IValue& value, Device device) {
  const auto move = [&](const at::Tensor& tensor) {
    const bool there = !tensor.defined() || tensor.device().is_cuda() == device.is_cuda();
    return there ? tensor : on(tensor, device);
  };
  if (value.isTensor()) return move(value.toTensor());
  if (value.isTensorList()) {
    List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorList()) out.push_back(move(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    List<std::optional<at::Tensor>> out;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      out.push_back(tensor.has_value() ? std::optional(move(*tensor)) : tensor);
    return out;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return device;
  return value;
}

// ---- Ops: on the same memory, by the CPU's kernel ----

void run_on_host(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto& returns = op.schema().returns();
  const auto first = stack->size() - arguments.size();
  const std::vector<IValue> given(stack->begin() + first, stack->end());
  ++launches;
  for (size_t i = 0; i < given.size(); ++i) (*stack)[first + i] = moved(given[i], host);
  const std::vector<IValue> aliases(stack->begin() + first, stack->end());
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);

  const auto written = [](const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  };
  for (size_t i = 0; i < given.size(); ++i) {
    if (!written(arguments[i]) || !given[i].isTensor() || !is_card(given[i].toTensor())) continue;
    const auto& alias = aliases[i].toTensor();
    const auto& original = given[i].toTensor();
    if (alias.sizes() == original.sizes()) continue;
    at::native::resize_(original, alias.sizes(), std::nullopt);  // the op has resized its out=
    on_host(original).copy_(alias);
  }
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& result = (*stack)[stack->size() - returns.size() + i];
    result = moved(result, card);
    for (size_t j = 0; written(returns[i]) && j < given.size(); ++j) {
      if (!written(arguments[j])) continue;
      const auto& names = arguments[j].alias_info()->beforeSets();
      if (names == returns[i].alias_info()->beforeSets()) result = given[j];
    }
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}
// The collectives of gloo. Torch has kernels of its own for CUDA, so each is replaced.
TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name : {
           "allreduce_", "allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_",
           "allreduce_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
           "reduce_scatter_tensor_coalesced_", "alltoall_base_", "alltoall_", "broadcast_",
           "reduce_", "gather_", "scatter_", "send", "recv_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// ---- Ops that have to know the device ----

at::Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_generic(size, &allocator, keys, dtype_or_default(dtype), format);
}
at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  const DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, dtype_or_default(dtype));
}
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (is_card(source) != is_card(self) && !non_blocking) count_sync("copy between host and card");
  ++launches;
  on_host(self).copy_(on_host(source));
  return self;
}
at::Scalar item(const at::Tensor& self) {
  count_sync("item");
  return at::_local_scalar_dense(on_host(self));
}
at::Tensor nonzero(const at::Tensor& self) {
  count_sync("nonzero");
  return on(at::nonzero(on_host(self)), card);
}
void record_stream(at::Tensor&, Stream) {}
at::Tensor& set_storage(at::Tensor& self, Storage source, int64_t offset, IntArrayRef size,
                        IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {size}, {1});
}
void resize_storage(const at::Tensor& whole, size_t bytes) {
  auto* storage = whole.storage().unsafeGetStorageImpl();
  DataPtr data = allocator.allocate(bytes);
  const auto kept = std::min(bytes, storage->nbytes());
  if (kept) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

// The grouped product as an H100 has it: bf16, 16 bytes, rows beyond the offsets left as they are.
void check_operand(const at::Tensor& x) {
  const auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "grouped_mm: needs bf16, got ", x.scalar_type());
  TORCH_CHECK(address % 16 == 0, "grouped_mm: the data pointer is no multiple of 16 bytes");
  const auto last = x.dim() - 1;
  for (const auto axis : {last - 1, last})
    TORCH_CHECK(x.stride(axis) == 1 || x.stride(axis) * x.itemsize() % 16 == 0,
                "grouped_mm: stride ", x.stride(axis), " is no multiple of 16 bytes");
  TORCH_CHECK(x.stride(last - 1) == 1 || x.stride(last) == 1, "grouped_mm: no axis of stride 1");
}
at::Tensor grouped_mm(const at::Tensor& a, const at::Tensor& b,
                      const std::optional<at::Tensor>& offsets, const std::optional<at::Tensor>&,
                      std::optional<at::ScalarType>) {
  check_operand(a);
  check_operand(b);
  TORCH_CHECK(offsets.has_value() && a.dim() == 2, "grouped_mm: emulated with offsets, 2-D rows");
  ++launches;
  const bool weights = b.dim() == 3;
  const auto ends = on_host(*offsets);
  const int64_t E = ends.numel();
  std::vector<int64_t> size{a.size(0), b.size(-1)};
  if (!weights) size.insert(size.begin(), E);
  const auto out = empty(size, at::kBFloat16, {}, {}, {}, {});
  const auto x = on_host(a), y = on_host(b), result = on_host(out);
  int64_t start = 0;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t end = ends[e].item<int>();
    const auto left = x.slice(weights ? 0 : 1, start, end);
    const auto right = weights ? y[e] : y.slice(0, start, end);
    const auto target = weights ? result.slice(0, start, end) : result[e];
    target.copy_(at::mm(left.to(at::kFloat), right.to(at::kFloat)));
    start = end;
  }
  return out;
}
at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "mm: needs one dtype");
  ++launches;
  return on(at::mm(on_host(a).to(dtype), on_host(b).to(dtype)), card);
}
at::Tensor& mm_dtype_out(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype,
                         at::Tensor& out) {
  on_host(out).copy_(on_host(mm_dtype(a, b, dtype)));
  return out;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", item);
  m.impl("nonzero", nonzero);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_grouped_mm", grouped_mm);
  m.impl("mm.dtype", mm_dtype);
  m.impl("mm.dtype_out", mm_dtype_out);
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("on_host", &on_host, "The same memory as a tensor of the CPU.");
  m.def("resize_storage", &resize_storage, "Resizes the storage of a tensor that is all of it.");
  m.def("warn_of_syncs", [](bool on) { warn_of_syncs = on; });
  m.def("syncs", [] { return syncs.load(); });
  m.def("launches", [] { return launches.load(); });
  m.def("allocated", [] { return allocated.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = allocated.load(); });
}
#endif
