// ONNX models: the graph, the model file, and the pad operation.
#pragma once

#include "tessera/base/error.h"
#include "tessera/formats/onnx/graph.h"
#include "tessera/formats/onnx/model.h"
#include "tessera/formats/onnx/pad.h"
