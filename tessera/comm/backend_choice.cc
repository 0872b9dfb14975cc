#include "tessera/comm/backend_choice.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/gloo_backend.h"
#include "tessera/comm/shm/handshake.h"

namespace tessera::comm {

bool is_backend(std::string_view name) { return name == "auto" || name == "shm" || name == "gloo" || name == "nccl"; }

c10::intrusive_ptr<c10d::Backend> choose_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const BackendRequest& request) {
  if (request.wanted != "gloo") {
    auto met = shm::shake_hands(*store, {.rank = request.rank,
                                         .size = request.size,
                                         .ranks = request.ranks,
                                         .ranks_on_host = request.ranks_on_host,
                                         .timeout = request.timeout});
    if (met.backend) return met.backend;
    TESSERA_CHECK(request.wanted != "shm", ErrorKind::kConfig,
                  "[comm.new_group] group '{}' has no shared memory: {}. Use comm.backend=auto or gloo.", request.group,
                  met.refusal);
    if (request.rank == 0 && met.same_host) {
      log_warning("[comm.new_group] group '{}' has no shared memory: {}. It uses Gloo, which is slower.", request.group,
                  met.refusal);
    }
  }
  return make_gloo_backend(
      store, {.rank = request.rank,
              .size = request.size,
              .loopback = request.one_host,
              .master = request.master,
              .timeout = request.timeout});
}

}  // namespace tessera::comm
