// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace diffulex {

/// Outcome classes of every call that can fail at run time. Ranges: 0 ok; 1-15 the caller's
/// fault; 16-31 a resource ran out; 32-47 the device; 48 and above a defect of this library.
enum class StatusCode : int32_t {
  kOk = 0,
  kInvalidArgument = 1,
  kOutOfRange = 2,
  kNotFound = 3,
  kAlreadyExists = 4,
  kUnsupported = 5,
  kOutOfPages = 16,
  kQueueFull = 17,
  kOutOfMemory = 18,
  kCudaError = 32,
  kNoKernel = 33,
  kInternal = 48,
};

/// Name of a code, e.g. "invalid_argument". Total: an unknown value gives "unknown".
[[nodiscard]] constexpr const char* to_string(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid_argument";
    case StatusCode::kOutOfRange:
      return "out_of_range";
    case StatusCode::kNotFound:
      return "not_found";
    case StatusCode::kAlreadyExists:
      return "already_exists";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kOutOfPages:
      return "out_of_pages";
    case StatusCode::kQueueFull:
      return "queue_full";
    case StatusCode::kOutOfMemory:
      return "out_of_memory";
    case StatusCode::kCudaError:
      return "cuda_error";
    case StatusCode::kNoKernel:
      return "no_kernel";
    case StatusCode::kInternal:
      return "internal";
  }
  return "unknown";
}

/// Success, or a code with a message `<where>: <what was expected>, got <what came>`.
class [[nodiscard]] Status final {
 public:
  Status() noexcept = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  [[nodiscard]] static Status ok_status() noexcept { return {}; }
  [[nodiscard]] bool ok() const noexcept { return code_ == StatusCode::kOk; }
  [[nodiscard]] StatusCode code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

/// A defect in this library or in the code embedding it; never raised for user input.
class InternalError final : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

namespace detail {

/// Concatenates the parts of a message with stream formatting.
template <typename... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace detail

/// Builds a failure from streamable message parts.
template <typename... Parts>
[[nodiscard]] Status make_error(StatusCode code, const Parts&... parts) {
  return Status(code, detail::concat(parts...));
}

/// A value, or the Status that explains its absence. Reading the value of a failed Result throws
/// InternalError: callers test ok() first.
template <typename T>
class [[nodiscard]] Result final {
 public:
  Result(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor): value or
  Result(Status status)  // NOLINT(google-explicit-constructor): status returns read naturally
      : status_(status.ok() ? Status(StatusCode::kInternal, "Result: built from an ok Status")
                            : std::move(status)) {}

  [[nodiscard]] bool ok() const noexcept { return value_.has_value(); }
  [[nodiscard]] const Status& status() const noexcept { return status_; }
  [[nodiscard]] T& value() & {
    require_value();
    return *value_;
  }
  [[nodiscard]] const T& value() const& {
    require_value();
    return *value_;
  }
  [[nodiscard]] T&& value() && {
    require_value();
    return std::move(*value_);
  }

 private:
  void require_value() const {
    if (!value_) {
      throw InternalError("Result::value: expected ok, got " + status_.message());
    }
  }

  std::optional<T> value_;
  Status status_;
};

}  // namespace diffulex

/// Precondition or invariant, checked in every build; throws diffulex::InternalError.
#define DIFFULEX_CHECK(condition, ...)                                                  \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      throw ::diffulex::InternalError(::diffulex::detail::concat(                       \
          __FILE__, ":", __LINE__, ": check failed: ", #condition, ": ", __VA_ARGS__)); \
    }                                                                                   \
  } while (false)

/// As DIFFULEX_CHECK, compiled out with NDEBUG.
#ifdef NDEBUG
#define DIFFULEX_DCHECK(condition, ...) \
  do {                                  \
  } while (false)
#else
#define DIFFULEX_DCHECK(condition, ...) DIFFULEX_CHECK(condition, __VA_ARGS__)
#endif

/// Returns early with the Status of `expression` unless it is ok.
#define DIFFULEX_RETURN_IF_ERROR(expression)            \
  do {                                                  \
    ::diffulex::Status diffulex_status_ = (expression); \
    if (!diffulex_status_.ok()) {                       \
      return diffulex_status_;                          \
    }                                                   \
  } while (false)
