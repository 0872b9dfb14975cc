// Tests the parts of the random programs that need no ranks: the text form, refusals, shrinking, and the drawn
// programs.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/conformance/programs/catalog.h"
#include "tests/conformance/programs/refusal.h"
#include "tests/conformance/programs/shrink.h"
#include "tests/conformance/programs/soundness.h"

namespace tessera::testing {
namespace {

const char* const kText =
    "mesh 2 2\n"
    "values 77\n"
    "%0 = input f64 [5, 3] uniform -2 2.5 (_S(0, 2), P(avg)) grad\n"
    "%1 = input i64 [4] below 5 (R, S(0))\n"
    "%2 = index_select(%0, 0, %1)\n"
    "%3 = redistribute(%2, (R, S(1))) async\n"
    "%4, %5 = max.dim(%3, -1, true)\n"
    "%6 = index.Tensor(%0, [None, %1])\n"
    "%7 = to.dtype(%6, bf16)\n"
    "item(%1)\n"
    "backward %4 (P(sum), R), %6 (R, R)\n"
    "twice\n";

TEST(ProgramText, RoundTripsThroughTheParser) { EXPECT_EQ(to_text(parse_program(kText)), kText); }

TEST(ProgramText, ParseErrorNamesTheLine) {
  EXPECT_THROW(
      try { parse_program("mesh 2\n%0 = input f64 [2 uniform (R)\n"); } catch (const std::runtime_error& error) {
        EXPECT_THAT(error.what(), ::testing::HasSubstr("input f64 [2 uniform"));
        throw;
      },
      std::runtime_error);
}

TEST(ProgramText, DrawnProgramsRoundTrip) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const std::string text = to_text(draw_program(seed, {2, 2}).program);
    EXPECT_EQ(to_text(parse_program(text)), text);
  }
}

TEST(DrawnPrograms, AreTheSameForTheSameSeed) {
  EXPECT_EQ(to_text(draw_program(5, {3}).program), to_text(draw_program(5, {3}).program));
  EXPECT_NE(to_text(draw_program(5, {3}).program), to_text(draw_program(6, {3}).program));
}

TEST(DrawnPrograms, CoverMoreThan200OperationsAndAllKindsOfOperands) {
  std::set<std::string> operations, placements;
  int64_t backward = 0, twice = 0, calls = 0;
  constexpr int kPrograms = 600;
  for (uint64_t seed = 0; seed < kPrograms; ++seed) {
    const Program program = draw_program(seed, {2, 2}).program;
    for (const auto& step : program.steps) {
      operations.insert(step.op);
      for (const auto& placement : step.placements) {
        std::string kind = to_string(placement);
        placements.insert(placement.is_any_shard() ? kind.substr(0, kind.find('(')) : kind);
      }
      placements.insert(short_name(step.type));
    }
    calls += program.calls();
    backward += !program.flows.empty();
    twice += program.twice;
  }
  EXPECT_GE(operations.size(), 230U);
  EXPECT_THAT(placements, ::testing::IsSupersetOf({"R", "S", "_S", "P(sum)", "P(avg)", "P(max)", "P(min)", "P(product)",
                                                   "_NormP(2)", "f64", "bf16", "c128", "i64", "bool", "u8"}));
  EXPECT_GE(calls, 6 * kPrograms);
  EXPECT_GE(backward, kPrograms / 2);
  EXPECT_GE(twice, kPrograms / 8);
}

bool is_sound_text(const std::string& text) {
  const Program program = parse_program(text);
  return is_sound(program, run_plain(program, Twin::kClean));
}

TEST(Soundness, RefusesResultsDecidedByRounding) {
  const auto sound = [](const std::string& steps) { return is_sound_text("mesh 2\nvalues 3\n" + steps); };
  EXPECT_TRUE(sound("%0 = input f64 [6] uniform -2 2 (R)\n%1 = floor(%0)\n"));
  // sin(x)/sin(x) is 1 except for its last bits.
  EXPECT_FALSE(sound("%0 = input f64 [6] uniform 1 2 (R)\n%1 = sin(%0)\n%2 = div.Tensor(%1, %1)\n%3 = floor(%2)\n"));
  EXPECT_TRUE(sound("%0 = input bf16 [6] uniform -2 2 (R)\n%1 = add.Tensor(%0, %0)\n"));
  EXPECT_FALSE(sound("%0 = input bf16 [6] uniform 1 2 (R)\n%1 = sin(%0)\n"));
}

TEST(Soundness, RefusesResultsDecidedByTheSignOfAZero) {
  EXPECT_FALSE(
      is_sound_text("mesh 2\nvalues 3\n%0 = input f64 [40] uniform -2 2 (R)\n%1 = mul.Scalar(%0, 0)\n%2 = "
                    "copysign.Tensor(%0, %1)\n"));
}

TEST(Soundness, RefusesResultsDecidedByTheSignOfAZeroOfAnyEarlierStep) {
  const auto sound = [](const std::string& steps) { return is_sound_text("mesh 2\nvalues 3\n" + steps); };
  for (const std::string type : {"f64", "bf16"}) {
    std::string steps = "%0 = input " + type + " [1] uniform 1 2 (R)\n%1 = mul.Scalar(%0, 0)\n";
    for (int i = 1; i < 8; ++i) {
      EXPECT_FALSE(sound(steps + fmt::format("%20 = signbit(%{})\n", i))) << i;
      steps += fmt::format("%{} = mul.Scalar(%{}, 2)\n", i + 1, i);
    }
    EXPECT_TRUE(sound(steps));
  }
  // A write to memory with a lazy conjugation.
  EXPECT_FALSE(
      sound("%0 = input c128 [4] uniform 1 2 (R)\n%1 = conj(%0)\n%2 = zero_(%1)\n%3 = imag(%2)\n%4 = signbit(%3)\n"));
}

TEST(Soundness, RefusesLowPrecisionZerosOfRoundedValues) {
  const auto sound = [](const std::string& type) {
    const Program program =
        parse_program("mesh 3\nvalues 3\n%0 = input " + type + " [9] distinct (R)\n%1 = mean(%0)\n");
    const Plain plain = run_plain(program, Twin::kClean);
    EXPECT_EQ(plain.values.tensors[1].item<double>(), 0);
    return is_sound(program, plain);
  };
  EXPECT_FALSE(sound("bf16"));
  EXPECT_TRUE(sound("f64"));
}

TEST(PlainTensors, RefuseResultsRoundedInALowerPrecisionThanTheirDtype) {
  const auto run = [](const std::string& steps) {
    run_plain(parse_program("mesh 2\nvalues 3\n%0 = input f16 [1] uniform 1 2 (R)\n"
                            "%1 = input f64 [1] uniform 1 2 (R)\n" +
                            steps),
              Twin::kClean);
  };
  EXPECT_THROW(run("%2 = cosine_similarity(%0, %1, 0)\n"), std::runtime_error);
  EXPECT_NO_THROW(run("%2 = cosine_similarity(%1, %1, 0)\n"));
  EXPECT_NO_THROW(run("%2 = add.Tensor(%0, %1)\n"));
}

TEST(PlainTensors, RefuseMissingSecondDerivativesBehindEmptyViews) {
  const auto run = [](const std::string& rows, const std::string& last, const std::string& rest) {
    run_plain(parse_program("mesh 2\nvalues 3\n%0 = input f64 [" + rows +
                            ", 3] uniform -2 2 (R) grad\n%1 = mul.Scalar(%0, 2)\n%2 = t(%1)\n%3 = relu6_(%2)\n"
                            "%4 = " +
                            last + "(%2)\nbackward %4 (R)\n" + rest),
              Twin::kClean);
  };
  EXPECT_THROW(run("0", "hardsigmoid", "twice\n"), std::runtime_error);
  EXPECT_NO_THROW(run("0", "hardsigmoid", ""));
  EXPECT_NO_THROW(run("0", "sin", "twice\n"));
}

TEST(PlainTensors, RefuseLowPrecisionSumsAndQuotientsWhosePartialsRound) {
  const auto run = [](const std::string& steps) {
    run_plain(parse_program("mesh 2\nvalues 3\n%0 = input bf16 [64] uniform -2 2 (R)\n"
                            "%1 = input bf16 [2] uniform -2 2 (R)\n%2 = input f64 [64] uniform -2 2 (R)\n" +
                            steps),
              Twin::kClean);
  };
  EXPECT_THROW(run("%3 = sum(%0)\n"), std::runtime_error);
  EXPECT_NO_THROW(run("%3 = sum(%1)\n"));
  EXPECT_NO_THROW(run("%3 = sum(%2)\n"));
  EXPECT_THROW(run("%3 = dot(%0, %0)\n"), std::runtime_error);
  EXPECT_NO_THROW(run("%3 = dot(%2, %2)\n"));
  const auto sound = [](const std::string& divisor) {
    return is_sound_text("mesh 2\nvalues 3\n%0 = input bf16 [4] uniform 3 3 (R)\n%1 = div.Scalar(%0, " + divisor +
                         ")\n");
  };
  EXPECT_TRUE(sound("2.0"));
  EXPECT_FALSE(sound("3.0")) << "is 1, but a share of it is a third";
}

// A share that overflows to infinity times a share that underflows to zero is NaN.
TEST(PlainTensors, RefuseLowPrecisionProductsWhosePartialsOverflow) {
  const auto run = [](const std::string& type, const std::string& from_to) {
    run_plain(parse_program(fmt::format("mesh 2\nvalues 3\n%0 = input {} [2, 20] uniform {} (R)\n"
                                        "%1 = triu(%0, 0)\n%2 = prod(%1)\n",
                                        type, from_to)),
              Twin::kClean);
  };
  EXPECT_THROW(run("f16", "2 2"), std::runtime_error);
  EXPECT_THROW(run("f16", "0.25 0.25"), std::runtime_error);
  EXPECT_NO_THROW(run("f16", "1 1"));
  EXPECT_NO_THROW(run("bf16", "2 2"));
  EXPECT_NO_THROW(run("f64", "2 2"));
}

TEST(Soundness, RefusesLowPrecisionGradientsDividedAmongThreeEqualElements) {
  const auto run = [](const std::string& type, int equal) {
    run_plain(parse_program(fmt::format("mesh 2\nvalues 3\n%0 = input {} [{}] uniform 1 1 (R) grad\n%1 = min(%0)\n"
                                        "backward %1 (P(sum))\n",
                                        type, equal)),
              Twin::kClean);
  };
  EXPECT_THROW(run("f32", 3), std::runtime_error);
  EXPECT_NO_THROW(run("f32", 2));
  EXPECT_NO_THROW(run("f64", 3));
}

// The terms cancel exactly for the whole, but not if one term is rounded in shares.
TEST(PlainTensors, RefuseLowPrecisionGradientsWhoseTermsRoundBeforeTheyCancel) {
  const auto run = [](const std::string& type, bool grad, const std::string& step) {
    run_plain(parse_program("mesh 2 3\nvalues 749828\n%0 = input " + type + " [6, 3] uniform -2 2 (P(sum), R)" +
                            (grad ? " grad" : "") + "\n%1 = input f32 [6, 3] uniform -2 2 (R, R)\n%2 = " + step + "\n"),
              Twin::kClean);
  };
  for (const std::string step : {"addcdiv(%1, %0, %0, 0.25)", "linalg_cross(%0, %0)", "copysign.Tensor(%0, %1)",
                                 "copysign.Scalar(%0, -2)", "hypot(%0, %1)"}) {
    EXPECT_THROW(run("bf16", true, step), std::runtime_error) << step;
    EXPECT_NO_THROW(run("f64", true, step)) << step;
    EXPECT_NO_THROW(run("bf16", false, step)) << step;
  }
}

// The cross product of a vector with itself is zero, but not if its two products are rounded in shares.
TEST(PlainTensors, RefuseLowPrecisionCrossProductsThatRoundBeforeTheyCancel) {
  const auto run = [](const std::string& type, const std::string& operand) {
    run_plain(parse_program("mesh 4\nvalues 198930\n%0 = input " + type + " [4, 4] uniform -2 2 (P(sum))\n%2 = input " +
                            type + " [4, 3] uniform -2 2 (R)\n%3 = tensordot(%0, %2, [1], [0])\n%7 = linalg_cross(" +
                            operand + ", " + operand + ")\n"),
              Twin::kClean);
  };
  EXPECT_THROW(run("f16", "%3"), std::runtime_error);
  EXPECT_NO_THROW(run("f16", "%2"));
  EXPECT_NO_THROW(run("f32", "%3"));
}

TEST(PlainTensors, RefuseDerivativesOfAStdThatIsOnlyRoundingError) {
  const auto run = [](bool grad, const std::string& step) {
    run_plain(parse_program("mesh 2 3\nvalues 786890\n%13 = input f64 [4, 1, 4] uniform 0.1 4.1 (P(sum), R)" +
                            std::string(grad ? " grad" : "") + "\n%14 = " + step +
                            "\n%15 = std.correction(%14, [0], 1, true)\n"),
              Twin::kClean);
  };
  EXPECT_THROW(run(true, "cosine_similarity(%13, %13, 2)"), std::runtime_error);
  EXPECT_NO_THROW(run(false, "cosine_similarity(%13, %13, 2)"));
  EXPECT_NO_THROW(run(true, "sin(%13)"));
}

TEST(PlainTensors, RefuseZeroTestsOfRoundingErrors) {
  const auto run = [](const std::string& scale, const std::string& step) {
    run_plain(parse_program("mesh 2\nvalues 7\n%0 = input f64 [3] uniform 1 2 (R)\n%1 = mul.Scalar(%0, " + scale +
                            ")\n%2 = " + step + "\n"),
              Twin::kClean);
  };
  for (const std::string step : {"logical_not(%1)", "logical_xor(%0, %1)", "any(%1)", "all.dim(%1, 0, false)",
                                 "to.dtype(%1, bool)", "eq.Scalar(%1, 0)", "isin.Tensor_Scalar(%1, 0.0)"}) {
    EXPECT_THROW(run("1e-14", step), std::runtime_error) << step;
    EXPECT_NO_THROW(run("1e-3", step)) << step;
    EXPECT_NO_THROW(run("0", step)) << step;
  }
  EXPECT_NO_THROW(run("1e-14", "to.dtype(%1, f32)"));
}

TEST(PlainTensors, RefuseOperationsThatLibtorchKernelsRoundDifferently) {
  const auto run = [](const std::string& type) {
    run_plain(parse_program("mesh 2\nvalues 7\n%0 = input " + type + " [3] uniform 0 0 (R)\n%1 = special_i0e(%0)\n"),
              Twin::kClean);
  };
  EXPECT_THROW(run("bf16"), std::runtime_error);
  EXPECT_NO_THROW(run("f32"));
}

// A program that continues without a refused step.
TEST(PlainTensors, RefuseToShardMissingDims) {
  const auto run = [](const std::string& size) {
    run_plain(parse_program("mesh 2\nvalues 402660\n%0 = input f64 " + size +
                            " uniform -2 2 (R)\n%19 = redistribute(%0, (S(1)))\n"),
              Twin::kClean);
  };
  EXPECT_THROW(run("[8]"), std::runtime_error);
  EXPECT_NO_THROW(run("[8, 1]"));
}

TEST(Soundness, RefusesScaledLowPrecisionPartials) {
  const auto sound = [](const std::string& type, const std::string& step) {
    return is_sound_text("mesh 2 2 2\nvalues 101099\n%2 = input " + type +
                         " [3, 4] uniform -2 2 (R, S(1), S(1))\n%3 = trace(%2)\n%8 = " + step + "\n");
  };
  EXPECT_FALSE(sound("f16", "rad2deg(%3)"));
  EXPECT_TRUE(sound("f16", "neg(%3)"));
  EXPECT_TRUE(sound("f64", "rad2deg(%3)"));
}

// The result is 0 because the weight is 0. The shares of the weight may give a sum that is not 0.
TEST(Soundness, RefusesTheSignOfAZeroFromANormWeight) {
  const auto sound = [](const std::string& steps) {
    return is_sound_text(
        "mesh 4 2\nvalues 313986\n%0 = input f64 [4, 4, 5] uniform -2 2 (R, P(sum))\n"
        "%5 = input f16 [5] uniform -2 2 (P(sum), R)\n%6 = rms_norm(%0, [5], %5, 0.1)\n" +
        steps);
  };
  EXPECT_TRUE(sound(""));
  EXPECT_FALSE(sound("%9 = sgn(%6)\n"));
}

// The value is 0 as a whole. Its shares are divided and rounded, and may give a sum that is not 0.
TEST(Soundness, RefusesZeroTestsOfValuesWithDividedPartials) {
  const auto sound = [](const std::string& step, const std::string& last) {
    return is_sound_text("mesh 4 2\nvalues 733722\n%0 = input f64 [3, 7, 3] distinct (S(1), P(sum))\n%1 = sum(%0)\n" +
                         fmt::format("%2 = input f64 [] uniform 0.2 4.2 (R, R)\n%3 = {}\n", step) + last);
  };
  for (const std::string step : {"div_.Tensor(%1, %2)", "mul.Scalar(%1, 0.1)", "rad2deg(%1)", "mean(%0)"}) {
    EXPECT_TRUE(sound(step, "")) << step;
    EXPECT_FALSE(sound(step, "%5 = logical_and(%3, %2)\n")) << step;
  }
  EXPECT_TRUE(sound("mul.Scalar(%1, 0.5)", "%5 = logical_and(%3, %2)\n"));
}

TEST(PlainTensors, RefuseTheDerivativeOfSincNearZero) {
  const auto run = [](const std::string& scale, Twin twin) {
    run_plain(parse_program("mesh 2\nvalues 7\n%0 = input f64 [3] uniform 1 2 (R) grad\n%1 = mul.Scalar(%0, " + scale +
                            ")\n%2 = sinc(%1)\nbackward %2 (R)\n"),
              twin);
  };
  EXPECT_THROW(run("1e-9", Twin::kClean), std::runtime_error);
  EXPECT_NO_THROW(run("0.1", Twin::kClean));
  EXPECT_NO_THROW(run("0", Twin::kClean)) << "exactly";
}

TEST(Soundness, RefusesLowPrecisionQuotientsWhosePartialsRound) {
  const auto sound = [](const std::string& step) {
    return is_sound_text("mesh 2 2\nvalues 560859\n%2 = input bf16 [2, 6] uniform 0.1 4.1 (R, P(sum))\n" + step);
  };
  EXPECT_FALSE(sound("%4 = true_divide_.Tensor(%2, %2)\n")) << "by itself, which is one afterwards";
  EXPECT_TRUE(sound("%4 = true_divide_.Scalar(%2, 2.0)\n"));
}

TEST(PlainTensors, RefuseLowPrecisionSecondGradientsWhosePartialsRound) {
  const auto sound = [](const std::string& type) {
    return is_sound_text(
        fmt::format("mesh 3\nvalues 505581\n%0 = input f32 [5, 2] uniform -2 2 (R) grad\n"
                    "%11 = input f32 [2, 5] uniform -2 2 (R) grad\n%14 = input f32 [2] uniform -2 2 (R) grad\n"
                    "%15 = input f64 [2, 2] uniform -2 2 (R) grad\n%28 = input {} [3, 2] uniform -2 2 (R) grad\n"
                    "%32 = copysign.Scalar(%28, -1)\nbackward %32 (P(sum))\ntwice\n",
                    type));
  };
  EXPECT_THROW(sound("f32"), std::runtime_error);
  EXPECT_TRUE(sound("f64"));
}

TEST(Soundness, RefusesLowPrecisionGradientsWhosePartialsRound) {
  const auto sound = [](const std::string& type, int size) {
    return is_sound_text(
        fmt::format("mesh 8\nvalues 301723\n%3 = input {0} [] uniform 0.3 4.3 (R) grad\n"
                    "%5 = input {0} [{1}, {1}] uniform -2 2 (R)\n%8 = add.Tensor(%5, %3)\nbackward %8 (P(sum))\n",
                    type, size));
  };
  EXPECT_FALSE(sound("bf16", 17));
  EXPECT_TRUE(sound("bf16", 2));
  EXPECT_TRUE(sound("f64", 17));
}

// A sum over seven rows is zero. Each rank's share of the sum is multiplied in products that round.
TEST(Soundness, RefusesLowPrecisionGradientsWhosePartialsRoundInLaterProducts) {
  const auto sound = [](const std::string& type) {
    return is_sound_text(
        fmt::format("mesh 8\nvalues 170747\n%0 = input {0} [7, 4] uniform -2 2 (R) grad\n"
                    "%4 = input {0} [7, 7] uniform -2 2 (R)\n%8 = prod(%0)\n%10 = sub.Tensor(%4, %8)\n"
                    "backward %10 (S(0))\n",
                    type));
  };
  EXPECT_FALSE(sound("f16"));
  EXPECT_TRUE(sound("f64"));
}

TEST(SecondDerivatives, MayBeMissingWhereOnlyZerosFlow) {
  const auto in_vain = [](const std::string& step) {
    return depends_in_vain(parse_program("mesh 2\nvalues 3\n%0 = input f64 [4] uniform 1 2 (R) grad\n"
                                         "%1 = mul.Tensor(%0, %0)\n" +
                                         step + "%3 = mul.Tensor(%0, %1)\nbackward %3 (R)\ntwice\n"),
                           0);
  };
  EXPECT_FALSE(in_vain(""));
  EXPECT_TRUE(in_vain("%2 = zero_(%1)\n"));
}

TEST(PlainTensors, RefuseUndefinedBehaviourOfPyTorch) {
  const auto run = [](const std::string& steps) {
    run_plain(parse_program("mesh 2\nvalues 3\n%0 = input f64 [4, 4] uniform -2 2 (R)\n" + steps), Twin::kClean);
  };
  EXPECT_THROW(run("%1 = select.int(%0, 1, 0)\n%2 = copy_(%0, %1)\n"), std::runtime_error);
  EXPECT_NO_THROW(run("%1 = mul_.Tensor(%0, %0)\n"));
  EXPECT_THROW(run("%1 = addmm_(%0, %0, %0)\n"), std::runtime_error);
  EXPECT_THROW(run("%1 = redistribute(%0, (R))\n%2 = zero_(%1)\n"), std::runtime_error);
  EXPECT_THROW(run("%1 = ravel(%0)\n%2 = zero_(%0)\n"), std::runtime_error);
  EXPECT_THROW(run("%1 = kron(%0, %0)\n%2 = zero_(%0)\n"), std::runtime_error);
  EXPECT_THROW(run("%1 = unfold(%0, 1, 2, 1)\n%2 = input f64 [4, 3] uniform -2 2 (R)\n"
                   "%3 = select_scatter(%1, %2, 2, 1)\n"),
               std::runtime_error);
  EXPECT_NO_THROW(run("%1 = alias(%0)\n%2 = zero_(%1)\n"));
  const std::string pairs =
      "%1 = input c128 [2] uniform -2 2 (R) grad\n%2 = mul.Tensor(%1, %1)\n"
      "%3 = view_as_real(%2)\n";
  EXPECT_THROW(run(pairs + "%4 = transpose_(%3, -1, 0)\n"), std::runtime_error);
  EXPECT_NO_THROW(run(pairs + "%4 = transpose.int(%3, -1, 0)\n"));
  EXPECT_THROW(run("%1 = input f64 [4] uniform -2 2 (R) grad\n%2 = exp(%1)\n%3 = logical_not_(%2)\n"),
               std::runtime_error);
}

TEST(Refusals, AreRecognizedByTheFullErrorText) {
  Step write, view, other;
  write.op = "add_.Tensor";
  view.op = "view";
  other.op = "add.Tensor";
  const std::string lost =
      "Sharding dimension mismatch: [dtensor.dispatch] aten::add_.Tensor: 'self' is a view along a sharded dim and "
      "holds a gathered copy, so a write to it would be lost. Clone it, or redistribute the tensor before "
      "taking the view.";
  EXPECT_EQ(refusal_of(write, lost), Refusal::kLostWrite);
  EXPECT_EQ(refusal_of(other, lost), Refusal::kNone) << "it writes to nothing";
  EXPECT_EQ(refusal_of(write, lost + " Else"), Refusal::kNone);
  EXPECT_EQ(refusal_of(write, "Sharding dimension mismatch"), Refusal::kNone);
  EXPECT_TRUE(matches("ab c", "a{}c"));
  EXPECT_FALSE(matches("ab cd", "a{}c"));
  EXPECT_FALSE(matches("xab c", "a{}c"));
}

TEST(Shrinking, RemovesAStepWithItsDependents) {
  const Program program = parse_program(
      "mesh 2\nvalues 1\n%0 = input f64 [4] uniform -2 2 (R) grad\n%1 = exp(%0)\n%2 = sin(%1)\n%3 = cos(%0)\n"
      "backward %2 (R), %3 (R)\n");
  const auto dropped = without(program, 1, /*bypass=*/false);
  ASSERT_TRUE(dropped);
  EXPECT_EQ(to_text(*dropped),
            "mesh 2\nvalues 1\n%0 = input f64 [4] uniform -2 2 (R) grad\n%3 = cos(%0)\nbackward %3 (R)\n");
  const auto bypassed = without(program, 1, /*bypass=*/true);
  ASSERT_TRUE(bypassed);
  EXPECT_THAT(to_text(*bypassed), ::testing::HasSubstr("%2 = sin(%0)"));
}

TEST(Shrinking, KeepsTheFailure) {
  const Program program = draw_program(12, {2}).program;
  const auto calls_of = [](const Program& p, const std::string& op) {
    return std::ranges::count_if(p.steps, [&](const Step& s) { return s.op == op; });
  };
  const std::string last = program.steps.back().op;
  const Program shrunk = shrink(program, [&](const Program& p) { return calls_of(p, last) > 0; });
  EXPECT_EQ(calls_of(shrunk, last), 1);
  EXPECT_LE(shrunk.steps.size(), program.steps.size());
}

}  // namespace
}  // namespace tessera::testing
