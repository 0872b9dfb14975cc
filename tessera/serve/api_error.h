// An error that is sent to the client: an HTTP status and the JSON error object of OpenAI's API.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "tessera/base/text/json.h"

namespace tessera::serve {

class ApiError : public std::runtime_error {
 public:
  ApiError(int status, const std::string& message, std::string code = "", std::string param = "")
      : std::runtime_error(message), status_(status), code_(std::move(code)), param_(std::move(param)) {}
  int status() const { return status_; }
  Json body() const {
    const char* type = status_ == 401   ? "authentication_error"
                       : status_ == 429 ? "rate_limit_error"
                       : status_ >= 500 ? "server_error"
                                        : "invalid_request_error";
    const auto text = [](const std::string& value) { return value.empty() ? Json() : Json(value); };
    return {{"error", {{"message", what()}, {"type", type}, {"param", text(param_)}, {"code", text(code_)}}}};
  }

 private:
  int status_;
  std::string code_, param_;
};

}  // namespace tessera::serve
