// csrc/ops/matmul_cuda.cc: matmul on CUDA: products as GEMMs of cuBLASLt.
//
// cuBLASLt is column-major: y[M, N] = a[M, K] b[N, K]^T is its d[N, M] with operands b and a, both
// K contiguous, which is the only form it has for FP4. In the best case a product is one GEMM from
// the codes straight into y. Other cases go panel by panel through the workspace:
//
// - A device without FP4 tensor cores: operands are dequantized to bfloat16 or float16, which is
//   exact, and multiplied as such.
// - A row of y that does not fill whole 16 bytes, which cuBLASLt refuses: float32 results of wider
//   rows, which a kernel finishes. cuBLASLt then reads past the last row of b: the codes of the
//   last rows are copied, and rows of zeros put after them.
// - A bias that cuBLASLt does not add, or not before the only rounding: the same kernel adds it.
#include "ops/matmul_cuda.h"

#include <algorithm>
#include <vector>

#include "core/scale_layout.h"
#include "cuda/gemm.h"

namespace nvfp4 {
namespace {

using cublaslt::DataType;

constexpr int64_t kAlign = 256;  // of the workspace and its parts
constexpr int64_t kOperandAlign = kGemmAlign;
constexpr int64_t kWholeResults = 4;  // float32 in those 16 bytes
constexpr int64_t kPaddedSingle = 8;  // rows in place of one, where one is refused
constexpr char kFinish[] = "the kernel that finishes the result";

int64_t RoundUp(int64_t x, int64_t to) { return CeilDiv(x, to) * to; }

bool IsAligned(const void* p, int64_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

// Null stays null.
const void* At(const void* p, int64_t bytes) {
  return p == nullptr ? nullptr : static_cast<const uint8_t*>(p) + bytes;
}

DataType DataTypeOf(FloatType type) {
  switch (type) {
    case FloatType::kF32:
      return cublaslt::kR32F;
    case FloatType::kBf16:
      return cublaslt::kR16BF;
    case FloatType::kF16:
      return cublaslt::kR16F;
  }
  return cublaslt::kR32F;
}

// How a product is made.
struct Way {
  bool dequantized;      // operands of 16 bits, else codes
  bool fused_bias;       // added by the GEMM
  bool through;          // float32 results in the workspace, which Finish makes y of
  bool finish;           // Finish runs: on those, or on y itself
  bool pads_single_row;  // of a
};

// Parts of a workspace.
class Arena {
 public:
  explicit Arena(const MatmulWorkspace& w) {
    const auto begin = reinterpret_cast<uintptr_t>(w.data);
    const auto aligned = (begin + kAlign - 1) / kAlign * kAlign;
    next_ = reinterpret_cast<uint8_t*>(aligned);
    left_ = std::max<int64_t>(0, w.size - static_cast<int64_t>(aligned - begin)) / kAlign * kAlign;
  }
  int64_t left() const { return left_; }
  uint8_t* Take(int64_t bytes) {
    bytes = RoundUp(bytes, kAlign);
    uint8_t* taken = next_;
    next_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  uint8_t* next_;
  int64_t left_;
};

// A step of at most `most` along an axis of `all`: all of it, or whole scale tiles, or, if even
// that is too much, whole 16 bytes of any result.
int64_t StepOf(int64_t most, int64_t all) {
  if (most >= all) return all;
  return most >= kTileRows ? most / kTileRows * kTileRows : std::max<int64_t>(0, most) / 8 * 8;
}

// One product, planned or enqueued.
class Multiplication {
 public:
  Multiplication(const MatmulShape& shape, const MatmulProduct& product,
                 const MatmulWorkspace& workspace, GemmDevice& device, CudaStream stream)
      : shape_(shape), p_(product), workspace_(workspace), device_(device), stream_(stream) {}

  // Enqueues nothing before all of a way is known to be possible.
  Failure Run(bool only_plan) {
    Failure failure;
    for (const Way& way : Ways()) {
      failure = Panels(way, /*plan=*/true);
      if (failure.refused) continue;
      return failure || only_plan ? failure : Panels(way, /*plan=*/false);
    }
    return failure;
  }

 private:
  // The ways to make the product, best first.
  std::vector<Way> Ways() const {
    const bool fits = shape_.n * SizeOf(shape_.out) % kOperandAlign == 0 &&
                      IsAligned(p_.y, kOperandAlign) && IsAligned(p_.accumulate, kOperandAlign);
    const bool has_bias = p_.bias != nullptr;
    std::vector<Way> ways;
    const auto add = [&](bool dequantized) {
      if (fits && !has_bias) ways.push_back({dequantized, false, false, false, false});
      if (fits && has_bias && shape_.bias == Half() &&
          IsAligned(p_.bias, kOperandAlign))  // the type that cuBLASLt adds
        ways.push_back({dequantized, true, false, false, false});
      if (fits && has_bias && shape_.out == FloatType::kF32 && p_.accumulate == nullptr)
        ways.push_back({dequantized, false, false, true, false});
      if (!fits || has_bias) ways.push_back({dequantized, false, true, true, false});
      if (shape_.m == 1) ways.push_back({dequantized, false, true, true, true});
    };
    // Every chip from 10.0 on has FP4 tensor cores. On 10.x, for which cuBLASLt's FP4 kernels were
    // made, a refusal is an error to be seen; elsewhere the slower way is taken.
    if (device_.major() >= 10) add(false);
    if (device_.major() != 10) add(true);
    return ways;
  }

  // Of dequantized operands: with float16 results cuBLASLt takes no bfloat16.
  FloatType Half() const {
    return shape_.out == FloatType::kF16 ? FloatType::kF16 : FloatType::kBf16;
  }

  Failure Panels(const Way& way, bool plan) const {
    const int64_t m = shape_.m, n = shape_.n;
    const int64_t k = CodesStride(shape_.k) * 2;  // with the zeros that fill a row
    const int64_t m_padded = way.pads_single_row ? kPaddedSingle : m;
    // Rows of b from here on are copied, with zeros after them.
    const bool ragged = !way.dequantized && way.through && n % kWholeResults != 0;
    const int64_t tail = ragged ? n / kTileRows * kTileRows : n;

    if (!way.dequantized) {
      for (const MatmulOperand* operand : {&p_.a, &p_.b})
        if (!IsAligned(operand->codes, kOperandAlign) || !IsAligned(operand->scales, kOperandAlign))
          return {"codes and scales must be aligned to 16 bytes"};
    }
    Arena arena(workspace_);
    const bool direct = !way.dequantized && !way.through;
    const int64_t gemm_size = direct ? arena.left() : arena.left() / 4 / kAlign * kAlign;
    GemmPointers pointers{};
    pointers.alpha = p_.alpha[0];
    pointers.workspace = arena.Take(gemm_size);
    // Steps along the rows of b, which are columns of y, and those of a.
    int64_t step_n = n, step_m = m_padded;
    uint8_t *staged_b = nullptr, *staged_a = nullptr;
    if (way.dequantized) {
      const int64_t row = k * 2;
      const int64_t room = way.through ? arena.left() / 3 * 2 : arena.left();
      const int64_t rows = (room - 2 * kAlign) / row - kWholeResults;
      if (step_n + step_m > rows) {
        int64_t& smaller = step_n > step_m ? step_m : step_n;
        int64_t& larger = step_n > step_m ? step_n : step_m;
        smaller = StepOf(rows / 2, smaller);
        larger = StepOf(rows - smaller, larger);
      }
      staged_b = arena.Take(RoundUp(step_n, kWholeResults) * row);
      staged_a = arena.Take(step_m * row);
    } else {
      if (ragged) staged_b = arena.Take(RoundUp(n - tail, kWholeResults) * k / 2);
      if (way.pads_single_row) staged_a = arena.Take(m_padded * k / 2);
    }
    if (way.through && step_n > 0 && step_m > 0) {
      const int64_t most = arena.left() / kWholeResults / 4 * kWholeResults;  // float32 results
      const int64_t wide = std::max<int64_t>(most / std::min<int64_t>(step_m, 2048), kTileRows);
      step_n = StepOf(wide / kWholeResults * kWholeResults, step_n);
      step_m = step_n > 0 ? StepOf(most / RoundUp(step_n, kWholeResults), step_m) : 0;
    }
    uint8_t* const staged_y = arena.Take(0);
    const auto whole_tiles = [](int64_t step, int64_t all) {
      return step == all || step % kTileRows == 0;
    };
    if (arena.left() < 0 || step_n <= 0 || step_m <= 0 ||
        (!way.dequantized && !(whole_tiles(step_n, n) && whole_tiles(step_m, m_padded))))
      return {"a workspace of " + std::to_string(workspace_.size) + " bytes is too small"};

    for (int64_t n0 = 0, rows_b; n0 < n; n0 += rows_b) {
      rows_b = std::min(step_n, n - n0);
      if (n0 < tail) rows_b = std::min(rows_b, tail - n0);
      const int64_t padded_b = way.through ? RoundUp(rows_b, kWholeResults) : rows_b;
      if (auto f = Operand(way, p_.b, n, n0, rows_b, padded_b, staged_b, plan, &pointers.a,
                           &pointers.a_scales))
        return f;
      for (int64_t m0 = 0; m0 < m; m0 += step_m) {
        const int64_t rows_a = std::min(step_m, m - m0);
        const int64_t padded_a = way.pads_single_row ? m_padded : rows_a;
        const bool is_there = n0 > 0 && step_m >= m;  // staged for the last n0
        if (!is_there)
          if (auto f = Operand(way, p_.a, m, m0, rows_a, padded_a, staged_a, plan, &pointers.b,
                               &pointers.b_scales))
            return f;
        const int64_t at = m0 * n + n0, at_bytes = at * SizeOf(shape_.out);
        uint8_t* const y = static_cast<uint8_t*>(p_.y) + at_bytes;
        const void* const accumulate = At(p_.accumulate, at_bytes);
        const void* const bias = At(p_.bias, n0 * SizeOf(shape_.bias));
        GemmSpec spec{};
        spec.m = padded_b;
        spec.n = padded_a;
        spec.k = k;
        spec.operands = way.dequantized ? DataTypeOf(Half()) : cublaslt::kR4F_E2M1;
        spec.result = way.through ? cublaslt::kR32F : DataTypeOf(shape_.out);
        spec.result_stride = way.through ? padded_b : n;
        spec.has_bias = way.fused_bias;
        spec.workspace_size = gemm_size;
        pointers.d = way.through ? staged_y : y;
        if (!way.through) pointers.c = accumulate;
        if (way.fused_bias) {
          spec.bias = DataTypeOf(shape_.bias);
          pointers.bias = bias;
        }
        if (plan) {
          if (auto f = device_.Plan(spec, pointers)) return f;
          continue;
        }
        if (auto f = device_.Enqueue(spec, pointers, stream_)) return f;
        if (!way.finish) continue;
        FinishArgs finish{};
        finish.source = static_cast<const float*>(pointers.d);
        finish.source_stride = spec.result_stride;
        finish.rows = rows_a;
        finish.columns = rows_b;
        finish.stride = n;
        finish.type = shape_.out;
        finish.bias_type = shape_.bias;
        finish.bias = bias;
        finish.accumulate = accumulate;
        finish.y = y;
        if (auto f = FailureOf(kFinish, Finish(finish, stream_))) return f;
      }
    }
    return {};
  }

  // Rows first .. first + rows - 1 of an operand, filled to `padded` rows with zeros, as the GEMM
  // reads them: where they lie, or staged.
  Failure Operand(const Way& way, const MatmulOperand& operand, int64_t all, int64_t first,
                  int64_t rows, int64_t padded, uint8_t* staged, bool plan, const void** data,
                  const void** scales) const {
    const int64_t stride = CodesStride(shape_.k);
    *scales = nullptr;
    if (way.dequantized) {
      *data = staged;
      if (plan) return {};
      return FailureOf("the kernel that dequantizes an operand",
                       DequantizePanel({operand.codes, operand.scales, all, shape_.k, first, padded,
                                        Half(), staged},
                                       stream_));
    }
    *scales = operand.scales + ScaleOffset(first, 0, TileColumns(shape_.k));
    const uint8_t* const codes = operand.codes + first * stride;
    *data = codes;
    if (padded == rows) return {};
    *data = staged;
    if (plan) return {};
    return FailureOf("the kernel that pads an operand",
                     Pad({codes, rows * stride, padded * stride, staged}, stream_));
  }

  const MatmulShape& shape_;
  const MatmulProduct& p_;
  const MatmulWorkspace& workspace_;
  GemmDevice& device_;
  const CudaStream stream_;
};

// K = 0: a sum over nothing.
Failure Empty(const MatmulShape& shape, const MatmulProduct& p, CudaStream stream) {
  FinishArgs finish{};
  finish.alpha = p.alpha[0];
  finish.rows = shape.m;
  finish.columns = finish.stride = shape.n;
  finish.type = shape.out;
  finish.bias_type = shape.bias;
  finish.bias = p.bias;
  finish.accumulate = p.accumulate;
  finish.y = p.y;
  return FailureOf(kFinish, Finish(finish, stream));
}

std::string Execute(const MatmulShape& shape, const MatmulProduct* products, int64_t count,
                    const MatmulWorkspace& workspace, CudaStream stream, bool only_plan) {
  if (count == 0 || shape.m == 0 || shape.n == 0) return "";
  std::shared_ptr<GemmDevice> device;
  Failure failure;
  if (shape.k != 0) {
    failure = GemmDevice::Current(&device);
    if (!failure && device->major() < 8)
      failure = {
          "devices of compute capability 8.0 and later are supported, as others have no "
          "bfloat16"};
  }
  for (int64_t i = 0; i < count && !failure; ++i) {
    if (shape.k != 0) {
      failure = Multiplication(shape, products[i], workspace, *device, stream).Run(only_plan);
    } else if (!only_plan) {
      failure = Empty(shape, products[i], stream);
    }
  }
  if (!failure) return "";
  const MatmulProduct& p = products[0];
  std::string text = "nvfp4_matmul: " + failure.what + "; for " + Name(shape.out) +
                     "[M = " + std::to_string(shape.m) + ", N = " + std::to_string(shape.n) +
                     "] with K = " + std::to_string(shape.k);
  if (p.bias != nullptr) text += std::string(", ") + Name(shape.bias) + " bias";
  if (p.accumulate != nullptr) text += ", accumulate";
  if (device != nullptr) text += ", on " + device->Name();
  return text;
}

}  // namespace

std::string MatmulOnCuda(const MatmulShape& shape, const MatmulProduct* products, int64_t count,
                         const MatmulWorkspace& workspace, CudaStream stream) {
  return Execute(shape, products, count, workspace, stream, /*only_plan=*/false);
}

std::string PlanMatmulOnCuda(const MatmulShape& shape, const MatmulProduct* products, int64_t count,
                             const MatmulWorkspace& workspace) {
  return Execute(shape, products, count, workspace, nullptr, /*only_plan=*/true);
}

}  // namespace nvfp4
