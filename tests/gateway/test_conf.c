#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gateway/conf.h"

static gw_conf *conf;
static gw_conf_action action;
static base_err err;

static base_code parse(const char *a, const char *b, const char *c, const char *d)
{
    char *argv[] = {"whimbrel", (char *)a, (char *)b, (char *)c, (char *)d};
    int argc = 1;
    while (argc < 5 && argv[argc] != NULL)
        argc++;
    gw_conf_destroy(conf);
    conf = NULL;
    err = (base_err)BASE_ERR_INIT;
    return gw_conf_create(&conf, &action, argc, argv, &err);
}

static void refuses(const char *a, const char *b, const char *param, const char *text)
{
    cr_expect_neq(parse(a, b, NULL, NULL), BASE_OK, "%s %s", a, b);
    cr_expect_str_eq(err.param, param);
    cr_expect_not_null(strstr(err.text, text), "\"%s\" is not in \"%s\"", text, err.text);
}

static char *file_of(const char *text)
{
    static char path[] = "/tmp/whimbrel-conf-XXXXXX";
    static int fd = -1;
    if (fd < 0)
        fd = mkstemp(path);
    cr_assert_eq(ftruncate(fd, 0), 0);
    cr_assert_eq(pwrite(fd, text, strlen(text), 0), (ssize_t)strlen(text));
    return path;
}

static char *printed(void)
{
    char *text = NULL;
    size_t length;
    FILE *file = open_memstream(&text, &length);
    gw_conf_print(conf, file);
    fclose(file);
    return text;
}

Test(conf, default_json_is_what_the_table_says)
{
    cr_assert_eq(parse(NULL, NULL, NULL, NULL), BASE_OK);
    char *now = printed(), file[16384];
    FILE *in = fopen(DEFAULT_JSON, "r");
    cr_assert_not_null(in);
    file[fread(file, 1, sizeof file - 1, in)] = '\0';
    fclose(in);
    cr_expect_str_eq(
        file, now,
        "config/default.json is old: build/whimbrel --print-config > config/default.json");
    free(now);
}

Test(conf, printing_and_reading_again_changes_nothing)
{
    cr_assert_eq(parse("--set=model.aliases=a \"b\",*", "--set=engine.draft=3",
                       "--set=log.level=warn", "--kv=f32"),
                 BASE_OK);
    cr_expect_eq(conf->model_aliases.count, 2u);
    cr_expect_eq(conf->engine_draft, 3);
    cr_expect_eq(conf->log_level, BASE_LOG_WARN);
    char *first = printed();
    char *path = file_of(first);
    cr_assert_eq(parse("--config", path, NULL, NULL), BASE_OK, "%s", err.text);
    char *second = printed();
    cr_expect_str_eq(first, second);
    free(first);
    free(second);
    unlink(path);
}

Test(conf, flags_beat_the_file_and_the_last_flag_wins)
{
    char *path = file_of("{\"server\":{\"listen\":\"127.0.0.1:1\",\"loops\":7}}");
    cr_assert_eq(parse("--listen=127.0.0.1:2", "--config", path, "--listen=127.0.0.1:3"), BASE_OK);
    cr_expect_str_eq(conf->server_listen, "127.0.0.1:3");
    cr_expect_eq(conf->server_loops, 7u);
    cr_expect_eq(action, GW_CONF_SERVE);
    unlink(path);
}

Test(conf, mistakes_name_the_key_and_the_bound)
{
    refuses("--set", "server.lisen=x", "server.lisen", "\"server.listen\"");
    refuses("--set", "listen=x", "listen", "\"server.listen\"");
    refuses("--set", "engine.draft=8", "engine.draft", "0 and 7");
    refuses("--set", "engine.kv=int4", "engine.kv", "nvfp4|fp8|bf16|f32");
    refuses("--set", "server.loops=-1", "server.loops", "whole number");
    refuses("--set", "server.loops=99999999999999999999", "server.loops", "whole number");
    refuses("--set", "server.loops=4294967297", "server.loops", "256");
    refuses("--set", "metrics.public=yes", "metrics.public", "true or false");
    refuses("--set", "nothing", "--set", "KEY=VALUE");
    refuses("--lisen", "x", "argv", "--listen");
    refuses("--config", NULL, "--config", "needs a value");
    refuses("--version=3", NULL, "--version", "takes no value");
    refuses("--config", "/nowhere/at.json", "--config", "/nowhere/at.json");
    refuses("--set", "server.tls_listen=127.0.0.1:0", "server.tls_cert", "server.tls_cert");
    refuses("--set", "limits.body_bytes_total_max=2000000", "limits.body_bytes_max", "2000000");
    refuses("--set", "engine.step_rows_max=16", "engine.prefill_chunk_tokens", "16");
    const char *const files[][3] = {
        {"{\"server\":{\"loops\":\"2\"}}", "server.loops", "a whole number"},
        {"{\"server\":{\"loops\":2.0}}", "server.loops", "a whole number"},
        {"{\"server\":{\"loop\":2}}", "server.loop", "server.loops"},
        {"{\"server\":2}", "server", "an object"},
        {"{\"serve\":{}, \"x\":1}", "x", "unknown key"},
        {"{\"model\":{\"aliases\":[1]}}", "model.aliases", "model.aliases[0]"},
        {"{\"server\":{}", "--config", "line 1"},
        {"[]", "--config", "not a JSON object"},
        {"{\"log\":{\"level\":\"info\",\"level\":\"warn\"}}", "--config", "duplicate"},
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char *path = file_of(files[i][0]);
        refuses("--config", path, files[i][1], files[i][2]);
    }
    unlink(file_of(""));
}

Test(conf, loopback_is_known_by_its_address)
{
    cr_expect(gw_conf_is_loopback("127.0.0.1:8080"));
    cr_expect(gw_conf_is_loopback("127.9.0.1:0"));
    cr_expect(gw_conf_is_loopback("[::1]:80"));
    cr_expect(gw_conf_is_loopback("localhost:80"));
    cr_expect_not(gw_conf_is_loopback("0.0.0.0:80"));
    cr_expect_not(gw_conf_is_loopback("[::]:80"));
    cr_expect_not(gw_conf_is_loopback(":80"));
    cr_expect_not(gw_conf_is_loopback("localhost.example:80"));
    cr_expect_not(gw_conf_is_loopback("128.0.0.1:80"));
}
