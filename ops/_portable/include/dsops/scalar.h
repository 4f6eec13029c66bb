// The 16-bit floats of c10, bit for bit, and the numbers and names of its scalar types.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace c10 {

template <class To, class From>
inline To bits_as(From from)
{
    static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Rounds to nearest even; every NaN becomes 0x7fc0 (torch/headeronly/util/BFloat16.h, round_to_nearest_even).
struct alignas(2) BFloat16 {
    uint16_t x;
    BFloat16() = default;
    BFloat16(float value) : x(round(value)) {}
    operator float() const { return bits_as<float>(uint32_t(x) << 16); }

private:
    static uint16_t round(float value)
    {
        if (std::isnan(value)) return 0x7fc0;
        const uint32_t bits = bits_as<uint32_t>(value);
        return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
};

// IEEE 754 binary16, converted by the instruction that c10 uses where the level has one, which keeps what it can of a
// NaN's payload (torch/headeronly/util/Half.h). Where there is none, it rounds to nearest even and every NaN becomes 0x7e00
// with its sign, as in c10; spelled out because gcc 10 has no _Float16 on x86. Nothing there makes or takes a subnormal
// float, so that torch.set_flush_denormal changes no result.
struct alignas(2) Half {
    uint16_t x;
    Half() = default;
    Half(float value) : x(round(value)) {}
    operator float() const { return widen(x); }

private:
#if defined(__F16C__)
    static float widen(uint16_t half) { return _cvtsh_ss(half); }
    static uint16_t round(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__aarch64__)
    static float widen(uint16_t half) { return bits_as<__fp16>(half); }
    static uint16_t round(float value) { return bits_as<uint16_t>(__fp16(value)); }
#else
    static constexpr uint32_t kRebias = uint32_t(127 - 15) << 23;  // between the two formats' exponents

    static float widen(uint16_t half)
    {
        const uint32_t shifted = uint32_t(half & 0x7fffu) << 13;
        // An infinity's exponent is rebiased to a float's; the product takes the excess off the others, and quiets a NaN.
        const float normal = bits_as<float>(shifted + 2 * kRebias) * 0x1p-112f;
        const float subnormal = bits_as<float>(bits_as<uint32_t>(0.5f) | (half & 0x7fffu)) - 0.5f;
        const float magnitude = shifted < 0x400u << 13 ? subnormal : normal;
        return bits_as<float>(bits_as<uint32_t>(magnitude) | uint32_t(half & 0x8000u) << 16);
    }

    static uint16_t round(float value)
    {
        const uint32_t bits = bits_as<uint32_t>(value);
        const uint32_t magnitude = bits & 0x7fffffffu;
        const uint32_t rebiased = magnitude - kRebias;
        const uint32_t rounded = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
        const uint32_t normal = magnitude >= 0x477ff000u ? 0x7c00u : rounded;  // 65520 is nearest to infinity
        // Between 0.5 and 1 a float counts in units of 2^-24, as a subnormal half does.
        const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
        const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
        return uint16_t((magnitude > 0x7f800000u ? 0x7e00u : finite) | ((bits >> 16) & 0x8000u));
    }
#endif
};

// Numbers and names of torch/headeronly/core/ScalarType.h, which are the same in every release since 1.8.
enum class ScalarType : int8_t {
    Byte = 0,
    Char = 1,
    Short = 2,
    Int = 3,
    Long = 4,
    Half = 5,
    Float = 6,
    Double = 7,
    ComplexHalf = 8,
    ComplexFloat = 9,
    ComplexDouble = 10,
    Bool = 11,
    QInt8 = 12,
    QUInt8 = 13,
    QInt32 = 14,
    BFloat16 = 15,
    Undefined = 127,
};

struct ScalarFacts {
    const char* name;
    uint8_t size;
};
inline ScalarFacts facts_of(ScalarType type)
{
    static constexpr ScalarFacts known[] = {
        {"Byte", 1},        {"Char", 1},         {"Short", 2},          {"Int", 4},  {"Long", 8},  {"Half", 2},
        {"Float", 4},       {"Double", 8},       {"ComplexHalf", 4},    {"ComplexFloat", 8},
        {"ComplexDouble", 16}, {"Bool", 1},      {"QInt8", 1},          {"QUInt8", 1}, {"QInt32", 4}, {"BFloat16", 2},
    };
    return uint8_t(type) < sizeof known / sizeof *known ? known[uint8_t(type)] : ScalarFacts{"Undefined", 0};
}
inline const char* toString(ScalarType type) { return facts_of(type).name; }

template <class T>
struct CppTypeToScalarType;
template <>
struct CppTypeToScalarType<float> : std::integral_constant<ScalarType, ScalarType::Float> {};
template <>
struct CppTypeToScalarType<Half> : std::integral_constant<ScalarType, ScalarType::Half> {};
template <>
struct CppTypeToScalarType<BFloat16> : std::integral_constant<ScalarType, ScalarType::BFloat16> {};

}  // namespace c10
