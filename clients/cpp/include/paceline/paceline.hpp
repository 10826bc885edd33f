// Paceline's C++ client: a large model's exact output, faster. Everything is included here.

#ifndef PACELINE_PACELINE_HPP_
#define PACELINE_PACELINE_HPP_

#include "paceline/client.hpp"
#include "paceline/errors.hpp"
#include "paceline/generation.hpp"
#include "paceline/options.hpp"
#include "paceline/words.hpp"

#endif  // PACELINE_PACELINE_HPP_
