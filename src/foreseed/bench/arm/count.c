/* A plugin for QEMU's user-mode emulators that prints how many instructions a program has executed. Debian ships
 * neither one nor the header, so what it needs of the interface is declared here; VERSION is the interface's. */
#include <stdint.h>
#include <stdio.h>

typedef uint64_t id;
struct tb;

int qemu_plugin_version = VERSION;
void qemu_plugin_register_vcpu_tb_trans_cb(id plugin, void (*callback)(id plugin, struct tb *tb));
void qemu_plugin_register_vcpu_tb_exec_cb(struct tb *tb, void (*callback)(unsigned cpu, void *data), int flags, void *data);
void qemu_plugin_register_atexit_cb(id plugin, void (*callback)(id plugin, void *data), void *data);
size_t qemu_plugin_tb_n_insns(const struct tb *tb);

static uint64_t executed;

static void on_executed(unsigned cpu, void *instructions) {
    (void)cpu;
    executed += (uintptr_t)instructions;
}

static void on_translated(id plugin, struct tb *tb) {
    (void)plugin;
    qemu_plugin_register_vcpu_tb_exec_cb(tb, on_executed, 0, (void *)qemu_plugin_tb_n_insns(tb));
}

static void on_exit(id plugin, void *data) {
    (void)plugin, (void)data;
    fprintf(stderr, "%llu\n", (unsigned long long)executed);
}

int qemu_plugin_install(id plugin, const void *info, int argc, char **argv) {
    (void)info, (void)argc, (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(plugin, on_translated);
    qemu_plugin_register_atexit_cb(plugin, on_exit, 0);
    return 0;
}
