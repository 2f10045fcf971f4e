// SPDX-License-Identifier: Apache-2.0
// The native methods of org.diffulex.edge.EdgeSession.

#include <executorch/runtime/platform/platform.h>
#include <jni.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "diffulex/edge/session.h"
#include "executorch_model.h"

namespace {

using diffulex::EdgeOptions;
using diffulex::EdgeSession;
using diffulex::EdgeStep;
using diffulex::Result;
using diffulex::Status;

constexpr const char* kBadArgument = "java/lang/IllegalArgumentException";
constexpr const char* kBadState = "java/lang/IllegalStateException";

/// A failure as a Java exception, which is thrown when the native method returns.
void throw_status(JNIEnv* env, const Status& status) {
  // Codes below 16 are the caller's.
  const char* kind = static_cast<int32_t>(status.code()) < 16 ? kBadArgument : kBadState;
  env->ThrowNew(env->FindClass(kind), status.message().c_str());
}

EdgeSession* session_of(jlong handle) {
  return reinterpret_cast<EdgeSession*>(handle);  // NOLINT(performance-no-int-to-ptr)
}

/// A new array of ids; null with an exception pending where there is no memory for it.
jintArray array_of(JNIEnv* env, const std::vector<int32_t>& ids) {
  const auto count = static_cast<jsize>(ids.size());
  jintArray array = env->NewIntArray(count);
  if (array != nullptr && count > 0) {
    env->SetIntArrayRegion(array, 0, count, ids.data());
  }
  return array;
}

Result<std::unique_ptr<EdgeSession>> open(const std::string& bundle, int32_t threads) {
  Result<EdgeOptions> options = EdgeOptions::load(bundle + "/session.conf");
  DIFFULEX_RETURN_IF_ERROR(options.status());
  auto model = diffulex::load_executorch_model(bundle + "/model.pte", threads);
  DIFFULEX_RETURN_IF_ERROR(model.status());
  return EdgeSession::create(options.value(), std::move(model).value());
}

/// Tells a listener what settled; an exception of it, or false, ends the answer.
class Listener {
 public:
  Listener(JNIEnv* env, jobject listener) : env_(env), listener_(listener) {
    if (listener_ != nullptr) {
      method_ = env_->GetMethodID(env_->GetObjectClass(listener_), "onTokens", "([I)Z");
    }
  }

  [[nodiscard]] bool wants_more(const std::vector<int32_t>& tokens) {
    // Nothing is called again while an exception is pending.
    if (!wants_more_ || method_ == nullptr || tokens.empty()) {
      return wants_more_;
    }
    jintArray array = array_of(env_, tokens);
    wants_more_ = array != nullptr &&
                  env_->CallBooleanMethod(listener_, method_, array) != JNI_FALSE &&
                  env_->ExceptionCheck() == JNI_FALSE;
    env_->DeleteLocalRef(array);
    return wants_more_;
  }

 private:
  JNIEnv* env_;
  jobject listener_;
  jmethodID method_ = nullptr;
  bool wants_more_ = true;
};

}  // namespace

extern "C" {

JNIEXPORT jlong JNICALL Java_org_diffulex_edge_EdgeSession_create(JNIEnv* env, jclass /*type*/,
                                                                  jstring bundle, jint threads) {
  static std::once_flag quiet;
  std::call_once(quiet, [] {
    using executorch::runtime::PalImpl;
    // The runtime reports what it does on standard error; failures come back as values.
    executorch::runtime::register_pal(PalImpl::create([](auto...) {}, "diffulex_edge_jni"));
  });
  if (bundle == nullptr || threads < 0) {
    env->ThrowNew(env->FindClass(kBadArgument), "session: expected a directory and threads >= 0");
    return 0;
  }
  const char* text = env->GetStringUTFChars(bundle, nullptr);
  if (text == nullptr) {  // an exception is pending
    return 0;
  }
  const std::string directory = text;
  env->ReleaseStringUTFChars(bundle, text);
  Result<std::unique_ptr<EdgeSession>> session = open(directory, threads);
  if (!session.ok()) {
    throw_status(env, session.status());
    return 0;
  }
  return reinterpret_cast<jlong>(std::move(session).value().release());
}

JNIEXPORT jintArray JNICALL
Java_org_diffulex_edge_EdgeSession_generate(JNIEnv* env, jclass /*type*/, jlong handle,
                                            jintArray prompt, jint max_tokens, jobject listener) {
  EdgeSession* session = session_of(handle);
  std::vector<int32_t> ids(prompt == nullptr ? 0
                                             : static_cast<size_t>(env->GetArrayLength(prompt)));
  if (!ids.empty()) {
    env->GetIntArrayRegion(prompt, 0, static_cast<jsize>(ids.size()), ids.data());
  }
  diffulex::SamplingParams params = session->options().request;
  const auto room = session->options().engine.max_model_len - static_cast<int32_t>(ids.size());
  params.max_tokens = max_tokens > 0 ? max_tokens : std::max(1, std::min(params.max_tokens, room));
  Listener told(env, listener);
  auto result = session->generate(ids, params, [&](const EdgeStep& step) {
    if (!told.wants_more(step.tokens)) {
      session->cancel();
    }
  });
  if (env->ExceptionCheck() != JNI_FALSE) {  // of the listener
    return nullptr;
  }
  if (!result.ok()) {
    throw_status(env, result.status());
    return nullptr;
  }
  if (result.value().finish_reason == diffulex::FinishReason::kError) {
    env->ThrowNew(env->FindClass(kBadState), "logits: expected finite numbers, got others");
    return nullptr;
  }
  return array_of(env, result.value().output_ids);
}

JNIEXPORT void JNICALL Java_org_diffulex_edge_EdgeSession_cancel(JNIEnv* /*env*/, jclass /*type*/,
                                                                 jlong handle) {
  session_of(handle)->cancel();
}

JNIEXPORT void JNICALL Java_org_diffulex_edge_EdgeSession_destroy(JNIEnv* /*env*/, jclass /*type*/,
                                                                  jlong handle) {
  delete session_of(handle);  // NOLINT(cppcoreguidelines-owning-memory)
}

}  // extern "C"
