#include "reduce.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <cmath>
#include <cstring>
#include <type_traits>

namespace delta {
namespace {

template <class T>
struct Wide {  // what a type is computed in
  using type = T;
};
template <>
struct Wide<c10::Half> {
  using type = float;
};
template <>
struct Wide<c10::BFloat16> {
  using type = float;
};
// Sums of small integers wrap around as torch's do; done unsigned, where that is defined.
template <class T>
using Arithmetic = std::conditional_t<std::is_integral_v<T> && !std::is_same_v<T, bool>,
                                      std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>, typename Wide<T>::type>;

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T, class F>
void each(char* out, const char* a, const char* b, size_t count, F f) {
  for (size_t i = 0; i < count; i++) {
    T value = f(load<T>(a + i * sizeof(T)), load<T>(b + i * sizeof(T)));
    std::memcpy(out + i * sizeof(T), &value, sizeof value);
  }
}

template <class T>
bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>)
    return std::isnan(value);
  else
    return false;
}

template <class T>
void sum(char* out, const char* a, const char* b, size_t count) {
  if constexpr (std::is_same_v<T, bool>)
    each<T>(out, a, b, count, [](bool x, bool y) { return x || y; });
  else
    each<T>(out, a, b, count,
            [](T x, T y) { return static_cast<T>(static_cast<Arithmetic<T>>(x) + static_cast<Arithmetic<T>>(y)); });
}

template <class T>
void product(char* out, const char* a, const char* b, size_t count) {
  if constexpr (std::is_same_v<T, bool>)
    each<T>(out, a, b, count, [](bool x, bool y) { return x && y; });
  else
    each<T>(out, a, b, count,
            [](T x, T y) { return static_cast<T>(static_cast<Arithmetic<T>>(x) * static_cast<Arithmetic<T>>(y)); });
}

template <class T>
void minimum(char* out, const char* a, const char* b, size_t count) {
  each<T>(out, a, b, count, [](T x, T y) {
    using W = typename Wide<T>::type;
    W v = static_cast<W>(x), w = static_cast<W>(y);
    return is_nan(v) || v < w ? x : y;
  });
}

template <class T>
void maximum(char* out, const char* a, const char* b, size_t count) {
  each<T>(out, a, b, count, [](T x, T y) {
    using W = typename Wide<T>::type;
    W v = static_cast<W>(x), w = static_cast<W>(y);
    return is_nan(v) || v > w ? x : y;
  });
}

template <class T>
void bit_and(char* out, const char* a, const char* b, size_t count) {
  each<T>(out, a, b, count, [](T x, T y) { return static_cast<T>(x & y); });
}
template <class T>
void bit_or(char* out, const char* a, const char* b, size_t count) {
  each<T>(out, a, b, count, [](T x, T y) { return static_cast<T>(x | y); });
}
template <class T>
void bit_xor(char* out, const char* a, const char* b, size_t count) {
  each<T>(out, a, b, count, [](T x, T y) { return static_cast<T>(x ^ y); });
}

template <class T>
Reducer pick(ReduceKind kind) {
  constexpr bool ordered = !c10::is_complex<T>::value;
  switch (kind) {
    case ReduceKind::kSum: return sum<T>;
    case ReduceKind::kProduct: return product<T>;
    case ReduceKind::kMin:
      if constexpr (ordered) return minimum<T>;
      break;
    case ReduceKind::kMax:
      if constexpr (ordered) return maximum<T>;
      break;
    case ReduceKind::kAnd:
      if constexpr (std::is_integral_v<T>) return bit_and<T>;
      break;
    case ReduceKind::kOr:
      if constexpr (std::is_integral_v<T>) return bit_or<T>;
      break;
    case ReduceKind::kXor:
      if constexpr (std::is_integral_v<T>) return bit_xor<T>;
      break;
  }
  return nullptr;
}

template <class T>
Reduction make(ReduceKind kind) {
  bool rounds = !std::is_integral_v<T> && (kind == ReduceKind::kSum || kind == ReduceKind::kProduct);
  return {pick<T>(kind), sizeof(T), rounds};
}

}  // namespace

Reduction reduction_for(c10::ScalarType type, ReduceKind kind) {
  switch (type) {
    case c10::ScalarType::Float: return make<float>(kind);
    case c10::ScalarType::Double: return make<double>(kind);
    case c10::ScalarType::Half: return make<c10::Half>(kind);
    case c10::ScalarType::BFloat16: return make<c10::BFloat16>(kind);
    case c10::ScalarType::Byte: return make<uint8_t>(kind);
    case c10::ScalarType::Char: return make<int8_t>(kind);
    case c10::ScalarType::Short: return make<int16_t>(kind);
    case c10::ScalarType::Int: return make<int32_t>(kind);
    case c10::ScalarType::Long: return make<int64_t>(kind);
    case c10::ScalarType::UInt16: return make<uint16_t>(kind);
    case c10::ScalarType::UInt32: return make<uint32_t>(kind);
    case c10::ScalarType::UInt64: return make<uint64_t>(kind);
    case c10::ScalarType::Bool: return make<bool>(kind);
    case c10::ScalarType::ComplexFloat: return make<c10::complex<float>>(kind);
    case c10::ScalarType::ComplexDouble: return make<c10::complex<double>>(kind);
    default: return {};
  }
}

}  // namespace delta
