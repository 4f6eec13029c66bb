// A borrowed view of a tensor, under the names by which DeepSpeed's sources ask one.
#pragma once
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "dsops/scalar.h"

namespace caffe2 {
struct TypeMeta {
    c10::ScalarType type;
};
}  // namespace caffe2

namespace at {
using c10::ScalarType;

inline ScalarType typeMetaToScalarType(caffe2::TypeMeta meta) { return meta.type; }

struct TensorOptions {
    ScalarType type;
    caffe2::TypeMeta dtype() const { return {type}; }
};

// The caller has seen to it that the memory is there, dense, and of the CPU. `owner` tells the caller when the last copy
// of a tensor that was passed by value is gone.
class Tensor {
public:
    Tensor() = default;
    Tensor(void* data, int64_t numel, ScalarType type, std::shared_ptr<void> owner)
        : data_(data), numel_(numel), type_(type), owner_(std::move(owner))
    {
    }
    void* data_ptr() const { return data_; }
    template <class T>
    T* data_ptr() const
    {
        return static_cast<T*>(data_);
    }
    int64_t numel() const { return numel_; }
    size_t element_size() const { return c10::facts_of(type_).size; }
    ScalarType scalar_type() const { return type_; }
    TensorOptions options() const { return {type_}; }
    bool defined() const { return type_ != ScalarType::Undefined; }
    bool is_contiguous() const { return true; }
    Tensor contiguous() const { return *this; }

private:
    void* data_ = nullptr;
    int64_t numel_ = 0;
    ScalarType type_ = ScalarType::Undefined;
    std::shared_ptr<void> owner_;
};
}  // namespace at

namespace torch {
using at::ScalarType;
using at::Tensor;
constexpr ScalarType kFloat32 = ScalarType::Float;
}  // namespace torch

// With one message, as the sources use it.
#define TORCH_CHECK(condition, message) \
    do {                                \
        if (!(condition)) throw std::runtime_error(message); \
    } while (false)
