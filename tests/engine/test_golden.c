/* The bundled model against the oracle: tests/vectors/nano-nvfp4.safetensors
 * (tests/vectors/README.md says what is in it). */
#include "tests/engine/golden_rig.h"

/* The text is what it is, so some prompts are sensitive: the file says how far noise moves each
 * row's logits. */
static const golden_bounds NANO = {.logits = 0.02,
                                   .moved_counts = true,
                                   .margin = 0.01,
                                   .gap = 0.05,
                                   .draft_logits = 0.05,
                                   .draft_gap = 0.1,
                                   .confidence = 0.02};

static void need_nano(void)
{
    if (access(MODELS "/nano/model.safetensors", R_OK) != 0)
        cr_skip_test("config/models/nano has no weights yet");
}

Test(golden, nano_matches_the_oracle, .timeout = 500)
{
    need_nano();
    golden_file("nano-nvfp4.safetensors", MODELS, "nano", "auto", "nvfp4", true, 8192, 256, &NANO);
}

/* The reference variant is plain and slow: the short prompts. */
Test(golden, nano_on_the_reference_variant_matches_the_oracle, .timeout = 500)
{
    need_nano();
    golden_file("nano-nvfp4.safetensors", MODELS, "nano", "ref", "nvfp4", false, 128, 128, &NANO);
}
