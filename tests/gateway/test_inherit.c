/* Sockets that a service manager passed: what is left alone, what is refused and by which name. The
 * way that works is tests/e2e/activation.test.mjs: descriptor 3 is not a test's to take. */
#include "gateway/inherit.h"

#include <criterion/criterion.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "gateway/conf.h"

static base_code inherit(gw_inherited *out, const char *pid, const char *count, const char *names,
                         const char *admin, base_err *err)
{
    char set[80], own[24];
    char *argv[] = {"whimbrel", "--set", set};
    gw_conf *conf;
    snprintf(set, sizeof set, "admin.listen=%s", admin);
    snprintf(own, sizeof own, "%ld", (long)getpid());
    *err = (base_err)BASE_ERR_INIT;
    cr_assert_eq(gw_conf_create(&conf, NULL, 3, argv, err), BASE_OK);
    base_code code = gw_inherit(out, conf, pid ? pid : own, count, names, err);
    gw_conf_destroy(conf);
    return code;
}

Test(inherit, nothing_and_what_is_meant_for_another_process_is_left_alone)
{
    static const char *const cases[][2] = {{"1", "3"}, {NULL, NULL}, {NULL, "0"}, {"", "1"}};
    base_err err;
    gw_inherited got;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cr_assert_eq(inherit(&got, cases[i][0], cases[i][1], "public", "127.0.0.1:0", &err),
                     BASE_OK);
        cr_assert(got.listen == -1 && got.tls == -1 && got.admin == -1);
    }
}

Test(inherit, a_name_a_listener_and_a_count_that_do_not_fit_are_named)
{
    base_err err;
    gw_inherited got;
    cr_assert_eq(inherit(&got, NULL, "2", "public2:admin", "127.0.0.1:0", &err), BASE_INVALID);
    cr_assert(strstr(err.text, "public2"), "%s", err.text);
    cr_assert_eq(inherit(&got, NULL, "1", "admin", "", &err), BASE_INVALID);
    cr_assert_str_eq(err.param, "admin.listen");
    cr_assert_eq(inherit(&got, NULL, "1", "tls", "127.0.0.1:0", &err), BASE_INVALID);
    cr_assert_str_eq(err.param, "server.tls_listen");
    cr_assert_eq(inherit(&got, NULL, "4", "public", "127.0.0.1:0", &err), BASE_INVALID);
    cr_assert_str_eq(err.param, "LISTEN_FDS");
    /* Descriptor 3 is whatever this process has there: a pipe, a file, or nothing. */
    cr_assert_eq(inherit(&got, NULL, "1", "public", "127.0.0.1:0", &err), BASE_INVALID);
    cr_assert(strstr(err.text, "descriptor 3"), "%s", err.text);
}

Test(inherit, an_address_is_told_of_tcp_sockets_only)
{
    char text[GW_ADDRESS_MAX];
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0), pair[2];
    cr_assert_eq(bind(fd, (struct sockaddr *)&four, sizeof four), 0);
    cr_assert(gw_socket_address(fd, text));
    cr_assert_eq(strncmp(text, "127.0.0.1:", 10), 0);
    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    cr_assert_not(gw_socket_address(pair[0], text));
    cr_assert_not(gw_socket_address(-1, text));
    close(fd);
    close(pair[0]);
    close(pair[1]);
}

Test(inherit, the_manager_is_told_at_its_socket)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    char got[32] = "", name[sizeof at.sun_path];
    int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
    snprintf(name, sizeof name, "@whimbrel-test-%ld", (long)getpid());
    memcpy(at.sun_path + 1, name + 1, strlen(name) - 1);
    cr_assert_eq(bind(fd, (struct sockaddr *)&at,
                      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name))),
                 0);
    gw_notify(NULL, "READY=1");
    gw_notify("/nowhere/at/all", "READY=1");
    gw_notify(name, "READY=1");
    cr_assert_eq(recv(fd, got, sizeof got, MSG_DONTWAIT), 7);
    cr_assert_str_eq(got, "READY=1");
    close(fd);
}
