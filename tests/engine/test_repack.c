/* Repacked weights that are kept: taken at the next start, made anew when anything differs. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/draft.h"
#include "engine/model_internal.h"
#include "tests/engine/model_rig.h"

static char folder[] = "/tmp/whimbrel-packed-XXXXXX";
static char target[64], draft_file[64];

static void set_up(void)
{
    cr_assert_not_null(mkdtemp(folder));
    snprintf(target, sizeof target, "%s/target.packed", folder);
    snprintf(draft_file, sizeof draft_file, "%s/draft.packed", folder);
}

static void tear_down(void)
{
    char beside[80];
    chmod(folder, 0700);
    unlink(target);
    unlink(draft_file);
    snprintf(beside, sizeof beside, "%s.new", target);
    unlink(beside);
    cr_assert_eq(rmdir(folder), 0, "something else was left in %s", folder);
}

TestSuite(repack, .init = set_up, .fini = tear_down);

static eng_model *load(const char *spec, uint64_t bytes_max)
{
    eng_model *model;
    base_err err = BASE_ERR_INIT;
    eng_model_options options = {.kv = "nvfp4",
                                 .threads = 2,
                                 .rows_max = 8,
                                 .context_max = 256,
                                 .packed = folder,
                                 .packed_bytes_max = bytes_max};
    cr_assert_eq(eng_model_load(&model, spec, &options, &err), BASE_OK, "%s", err.text);
    return model;
}

/* Whether the weights came from the file; whatever they came from, they are there. Afterwards the
 * file is written. */
static bool taken(const char *spec, uint64_t bytes_max)
{
    eng_model *model = load(spec, bytes_max);
    eng_repack *pack = eng_model__repack(model);
    const bool from_file = eng_repack__from_file(pack);
    eng_repack__settle(pack);
    eng_model_destroy(model);
    return from_file;
}

#define ALL UINT64_MAX
#define TINY VECTORS "/tiny"

static bool vectors(void)
{
    eng_model *model = load(TINY, 0);
    const bool packs = eng_model__repack(model) != NULL;
    eng_model_destroy(model);
    if (!packs)
        cr_skip("this processor has no vector variant");
    return packs;
}

/* Flips a bit of the byte at this offset; a negative one counts from the end. */
static void damage(const char *path, off_t at)
{
    struct stat st;
    int fd = open(path, O_RDWR);
    uint8_t byte;
    cr_assert(fd >= 0 && fstat(fd, &st) == 0);
    at += at < 0 ? st.st_size : 0;
    cr_assert_eq(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    cr_assert_eq(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

Test(repack, the_next_start_takes_the_file)
{
    if (!vectors())
        return;
    cr_assert_not(taken(TINY, ALL));
    cr_assert(taken(TINY, ALL));
    cr_assert(taken(TINY, ALL));
}

Test(repack, logits_are_the_same_bits)
{
    enum { ROWS = 40, VOCAB = 320 };
    static float logits[3][ROWS * VOCAB];
    int32_t ids[ROWS];
    if (!vectors())
        return;
    for (int i = 0; i < ROWS; i++)
        ids[i] = i * 7 % VOCAB;
    for (int run = 0; run < 3; run++) {
        /* 0: nothing kept, 1: kept, 2: taken */
        rig r = {.context = 256, .pages_each = 3};
        r.model = load(TINY, run == 0 ? 0 : ALL);
        r.config = eng_model_get_config(r.model);
        cr_assert_eq(eng_repack__from_file(eng_model__repack(r.model)), run == 2);
        kn_kv_shape shape = eng_model_kv_shape(r.model, 9);
        cr_assert_eq(kn_kv_create(&r.kv, eng_model_device(r.model), &shape, NULL), BASE_OK);
        for (uint32_t s = 0; s < RIG_SEQUENCES; s++) {
            r.pages[s] = malloc(3 * sizeof(uint32_t));
            for (uint32_t i = 0; i < 3; i++)
                r.pages[s][i] = s * 3 + i;
        }
        rig_run(&r, 0, ids, 0, ROWS, 8, logits[run]);
        eng_repack__settle(eng_model__repack(r.model));
        rig_close(&r);
    }
    cr_assert_arr_eq(logits[1], logits[0], sizeof logits[0]);
    cr_assert_arr_eq(logits[2], logits[0], sizeof logits[0]);
}

Test(repack, damage_is_found_wherever_it_is)
{
    /* magic, lengths, key, sum, a chunk's sum, the matrices */
    static const off_t OFFSETS[] = {0, 16, 30, 40, 50, 4096, 100000, -1};
    if (!vectors())
        return;
    cr_assert_not(taken(TINY, ALL));
    for (size_t i = 0; i < sizeof OFFSETS / sizeof *OFFSETS; i++) {
        damage(target, OFFSETS[i]);
        cr_assert_not(taken(TINY, ALL), "byte %lld", (long long)OFFSETS[i]);
        cr_assert(taken(TINY, ALL), "not made anew after byte %lld", (long long)OFFSETS[i]);
    }
}

Test(repack, a_cut_or_longer_file_is_made_anew)
{
    struct stat st;
    if (!vectors())
        return;
    cr_assert_not(taken(TINY, ALL));
    cr_assert_eq(stat(target, &st), 0);
    const off_t lengths[] = {0, 10, 70, st.st_size / 2, st.st_size - 1, st.st_size + 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        cr_assert_eq(truncate(target, lengths[i]), 0);
        cr_assert_not(taken(TINY, ALL), "%lld bytes", (long long)lengths[i]);
        cr_assert(taken(TINY, ALL));
    }
}

Test(repack, another_checkpoint_takes_its_place)
{
    struct stat one, other;
    if (!vectors())
        return;
    cr_assert_not(taken(TINY, ALL));
    cr_assert_eq(stat(target, &one), 0);
    cr_assert_not(taken(MODELS "/nano", ALL));
    cr_assert(taken(MODELS "/nano", ALL));
    cr_assert_eq(stat(target, &other), 0);
    cr_assert_gt(other.st_size, one.st_size);
    cr_assert_not(taken(TINY, ALL));
    cr_assert(taken(TINY, ALL));
}

Test(repack, what_is_too_large_is_not_kept_and_goes)
{
    if (!vectors())
        return;
    cr_assert_not(taken(TINY, 100));
    cr_assert_neq(access(target, F_OK), 0);
    cr_assert_not(taken(TINY, ALL));
    cr_assert_eq(access(target, F_OK), 0);
    cr_assert_not(taken(TINY, 0));
    cr_assert_neq(access(target, F_OK), 0);
}

/* A folder that is not there stands for a disk that refuses. */
Test(repack, a_disk_that_refuses_costs_nothing_but_the_file)
{
    char keep[sizeof folder];
    if (!vectors())
        return;
    memcpy(keep, folder, sizeof keep);
    snprintf(folder + strlen(folder) - 1, 2, "?");
    cr_assert_not(taken(TINY, ALL));
    cr_assert_not(taken(TINY, ALL));
    memcpy(folder, keep, sizeof keep);
}

Test(repack, an_end_in_the_middle_of_writing_leaves_nothing_half)
{
    char beside[80];
    if (!vectors())
        return;
    for (int i = 0; i < 20; i++) {
        eng_model_destroy(load(TINY, ALL)); /* stops the writer wherever it is */
        if (access(target, F_OK) == 0)
            cr_assert(taken(TINY, ALL), "a file that is there is whole");
        unlink(target);
    }
    /* What a killed process left goes. */
    snprintf(beside, sizeof beside, "%s.new", target);
    close(open(beside, O_WRONLY | O_CREAT, 0600));
    cr_assert_not(taken(TINY, ALL));
    cr_assert_neq(access(beside, F_OK), 0);
}

Test(repack, the_draft_has_a_file_of_its_own)
{
    if (!vectors())
        return;
    for (int run = 0; run < 2; run++) {
        base_err err = BASE_ERR_INIT;
        eng_draft *draft;
        eng_model *model = load(TINY, ALL);
        eng_repack__settle(eng_model__repack(model));
        cr_assert_eq(eng_draft_load(&draft, model, TINY "/dspark", 8, 1, &err), BASE_OK, "%s",
                     err.text);
        /* Destroying may stop the writer: wait for the rename. */
        for (int i = 0; i < 2000 && access(draft_file, F_OK) != 0; i++)
            usleep(1000);
        cr_assert_eq(access(draft_file, F_OK), 0);
        eng_draft_destroy(draft);
        eng_model_destroy(model);
    }
}
