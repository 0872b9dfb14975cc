// The server of `tessera serve`: OpenAI's API over HTTP.
#pragma once

#include "tessera/models.h"
#include "tessera/serve/server.h"
#include "tessera/text.h"
