// Nothing of it is needed; see gloo/context.h here.
#pragma once
