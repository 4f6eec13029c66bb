// Takes the place of pybind11: PYBIND11_MODULE fills a table of C functions, their signatures derived from the C++ types.
//
// A signature is one letter for each argument, and what is returned behind ">": i int32, q int64, Q uint64, B uint8,
// f float, d double, ? bool, r tensor by reference, t tensor by value, [x] vector of x, v nothing. "!" in front says that
// the function runs without the GIL. Arguments arrive in slots of 8 bytes: one each; two for a tensor by reference
// (address; number of elements, with the scalar type in the highest byte); three for one by value (those two, and the
// token of its owner); two for a vector (address of its elements' slots, how many there are).
#pragma once
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "dsops/tensor.h"

namespace dsops {

union Slot {
    int64_t number;
    double real;
    void* data;
    const Slot* slots;
};
static_assert(sizeof(Slot) == 8, "a slot has 8 bytes");

using Enter = int64_t (*)(void (*function)(), const Slot* slots);
void add(const char* name, std::string signature, void (*function)(), Enter enter);
int64_t fail(char kind, const char* what) noexcept;
std::shared_ptr<void> owner(uint64_t token);  // of no one, for the token 0

// What an argument is read as: its type without reference and const, but for a tensor by reference, which nobody owns.
template <class T>
using Kind = std::conditional_t<std::is_same_v<T, at::Tensor&>, T, std::remove_cv_t<std::remove_reference_t<T>>>;

template <class T>
struct Argument;

template <class T, char Letter>
struct Number {
    static constexpr int slots = 1;
    static std::string letters() { return {Letter}; }
    static T read(const Slot* slot) { return T(slot->number); }
};
template <class T, char Letter>
struct Real {
    static constexpr int slots = 1;
    static std::string letters() { return {Letter}; }
    static T read(const Slot* slot) { return T(slot->real); }
};
template <>
struct Argument<int32_t> : Number<int32_t, 'i'> {};
template <>
struct Argument<int64_t> : Number<int64_t, 'q'> {};
template <>
struct Argument<uint64_t> : Number<uint64_t, 'Q'> {};
template <>
struct Argument<uint8_t> : Number<uint8_t, 'B'> {};
template <>
struct Argument<bool> : Number<bool, '?'> {};
template <>
struct Argument<float> : Real<float, 'f'> {};
template <>
struct Argument<double> : Real<double, 'd'> {};

inline at::Tensor borrow(const Slot* slot, std::shared_ptr<void> owner)
{
    const auto facts = uint64_t(slot[1].number);
    return at::Tensor(slot[0].data, int64_t(facts << 8 >> 8), at::ScalarType(facts >> 56), std::move(owner));
}
template <>
struct Argument<at::Tensor&> {
    static constexpr int slots = 2;
    static std::string letters() { return "r"; }
    static at::Tensor read(const Slot* slot) { return borrow(slot, nullptr); }
};
template <>
struct Argument<at::Tensor> {
    static constexpr int slots = 3;
    static std::string letters() { return "t"; }
    static at::Tensor read(const Slot* slot) { return borrow(slot, owner(uint64_t(slot[2].number))); }
};

template <class T>
struct Argument<std::vector<T>> {
    static constexpr int slots = 2;
    static std::string letters() { return "[" + Argument<T>::letters() + "]"; }
    static std::vector<T> read(const Slot* slot)
    {
        std::vector<T> items;
        items.reserve(size_t(slot[1].number));
        for (int64_t i = 0; i < slot[1].number; ++i)
            items.push_back(Argument<T>::read(slot[0].slots + i * Argument<T>::slots));
        return items;
    }
};

template <class Result, class... Arguments>
struct Call {
    using Function = Result (*)(Arguments...);

    static int64_t enter(void (*function)(), const Slot* slots)
    {
        // pybind11's table of C++ exceptions and Python's (its documentation, "Built-in C++ to Python exception
        // translation"), for what the kernels and the standard library throw.
        try {
            return call(reinterpret_cast<Function>(function), slots, std::index_sequence_for<Arguments...>{});
        } catch (const std::bad_alloc& error) {
            return fail('M', error.what());
        } catch (const std::out_of_range& error) {
            return fail('I', error.what());
        } catch (const std::domain_error& error) {
            return fail('V', error.what());
        } catch (const std::invalid_argument& error) {
            return fail('V', error.what());
        } catch (const std::length_error& error) {
            return fail('V', error.what());
        } catch (const std::range_error& error) {
            return fail('V', error.what());
        } catch (const std::overflow_error& error) {
            return fail('O', error.what());
        } catch (const std::exception& error) {
            return fail('R', error.what());
        } catch (...) {
            return fail('R', "an exception that is no std::exception");
        }
    }

private:
    static constexpr int offset(size_t index)
    {
        const int widths[] = {Argument<Kind<Arguments>>::slots..., 0};
        int sum = 0;
        for (size_t i = 0; i < index; ++i) sum += widths[i];
        return sum;
    }

    template <size_t... Index>
    static int64_t call(Function function, const Slot* slots, std::index_sequence<Index...>)
    {
        // Braces evaluate in order; the tuple keeps what the function takes by reference.
        std::tuple<std::decay_t<Arguments>...> values{Argument<Kind<Arguments>>::read(slots + offset(Index))...};
        if constexpr (std::is_void_v<Result>) {
            function(static_cast<Arguments&&>(std::get<Index>(values))...);
            return 0;
        } else {
            return int64_t(function(static_cast<Arguments&&>(std::get<Index>(values))...));
        }
    }
};

}  // namespace dsops

namespace pybind11 {
struct gil_scoped_release {};
template <class... Guards>
struct call_guard {};
namespace literals {}

struct module_ {
    template <class Result, class... Arguments, class... Extra>
    module_& def(const char* name, Result (*function)(Arguments...), const Extra&...)
    {
        constexpr bool without_gil = (std::is_same_v<Extra, call_guard<gil_scoped_release>> || ...);
        std::string signature = without_gil ? "!" : "";
        ((signature += dsops::Argument<dsops::Kind<Arguments>>::letters()), ...);
        signature += ">";
        if constexpr (std::is_void_v<Result>)
            signature += "v";
        else
            signature += dsops::Argument<Result>::letters();
        dsops::add(name, std::move(signature), reinterpret_cast<void (*)()>(function),
                   &dsops::Call<Result, Arguments...>::enter);
        return *this;
    }
};
}  // namespace pybind11

#define PYBIND11_MODULE(name, variable)                              \
    static void dsops_fill_table(pybind11::module_& variable);       \
    static const bool dsops_table_is_filled = [] {                   \
        pybind11::module_ table;                                     \
        dsops_fill_table(table);                                     \
        return true;                                                 \
    }();                                                             \
    static void dsops_fill_table(pybind11::module_& variable)
