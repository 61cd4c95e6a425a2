/* Runs a fuzz target over the files of a folder: its kept corpus as an ordinary test. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv)
{
    DIR *folder = argc == 2 ? opendir(argv[1]) : NULL;
    uint32_t count = 0;
    if (folder == NULL) {
        fprintf(stderr, "usage: replay FOLDER\n");
        return 2;
    }
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        static uint8_t data[1 << 16];
        char path[4096];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", argv[1], entry->d_name);
        FILE *file = fopen(path, "rb");
        if (file == NULL) {
            perror(path);
            return 1;
        }
        size_t size = fread(data, 1, sizeof data, file);
        fclose(file);
        LLVMFuzzerTestOneInput(data, size);
        count++;
    }
    closedir(folder);
    printf("%u inputs\n", count);
    return count > 0 ? 0 : 1;
}
