// The server of `tessera serve`, which offers OpenAI's API over HTTP.
#pragma once

#include "tessera/models.h"
#include "tessera/serve/server.h"
#include "tessera/text.h"
