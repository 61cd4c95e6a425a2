/* The configuration: j a file, s one --set a line, l changes of live keys. */
#include "tests/fuzz/fuzz.h"

#include <jansson.h>

#include "gateway/conf.h"

static void create(int argc, char *const *argv)
{
    static FILE *nowhere;
    base_err err = BASE_ERR_INIT;
    gw_conf *conf;
    gw_conf_action action;
    if (nowhere == NULL)
        nowhere = fopen("/dev/null", "w");
    base_code code = gw_conf_create(&conf, &action, argc, argv, &err);
    MUST(code == err.code);
    if (code != BASE_OK) {
        MUST(err.text[0] != '\0');
        return;
    }
    gw_conf_print(conf, nowhere);
    (void)gw_conf_is_loopback(conf->server_listen);
    gw_conf_destroy(conf);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char program[] = "whimbrel", set[] = "--set", config[] = "--config";
    if (size < 1)
        return 0;
    const uint8_t *text = data + 1;
    size_t length = size - 1;
    if (data[0] == 'j') {
        create(3, (char *[]){program, config, (char *)fuzz_file(&fd, text, length), NULL});
    } else if (data[0] == 's') {
        char *argv[64] = {program}, *copy = calloc(1, length + 1), *rest = copy;
        int argc = 1;
        MUST(copy != NULL);
        memcpy(copy, text, length);
        for (char *line; argc < 62 && (line = strsep(&rest, "\n")) != NULL;) {
            argv[argc++] = set;
            argv[argc++] = line;
        }
        create(argc, argv);
        free(copy);
    } else if (data[0] == 'l') {
        base_err err = BASE_ERR_INIT;
        base_log_level level = BASE_LOG_INFO;
        json_t *changes = json_loadb((const char *)text, length, 0, NULL);
        if (changes != NULL)
            MUST(gw_conf_change(&level, changes, &err) == err.code);
        json_decref(changes);
    }
    return 0;
}
