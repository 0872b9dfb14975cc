// Shared code of the DTensor tests: thread ranks with a mesh, and the text of an expected error.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tessera/base/error.h"
#include "tessera/comm/rendezvous/thread_ranks.h"
#include "tessera/dtensor/debug/comm_debug.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::testing {

inline void on_ranks(int size, const std::vector<int64_t>& mesh_shape,
                     const std::function<void(const MeshPtr&)>& body) {
  comm::run_thread_ranks(size,
                         [&](std::shared_ptr<comm::World> world) { body(init_device_mesh(world, "cpu", mesh_shape)); });
}

template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kShape) << error.what();
    return error.what();
  }
  return "no error";
}

}  // namespace tessera::testing
