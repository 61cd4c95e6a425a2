"""Writes files as C string literals with their names, types and entity tags: embed_files.py OUTPUT NAME ROOT FILE…

The list is an initializer of `struct embedded_file {const char *path, *type, *etag, *bytes; size_t length;}`, which stands in the including file."""
import hashlib
import os
import sys

types = {'.html': 'text/html; charset=utf-8', '.css': 'text/css; charset=utf-8', '.js': 'text/javascript; charset=utf-8',
         '.svg': 'image/svg+xml', '.txt': 'text/plain; charset=utf-8'}


def literal(data):
    """C text of the bytes, a line of source each; octal escapes end after three digits, so what follows is never part of one."""
    shown = {ord('"'): '\\"', ord('\\'): '\\\\', ord('\n'): '\\n', ord('?'): '\\?'}
    lines = data.splitlines(keepends=True) or [b'']
    return '\n'.join('"' + ''.join(shown.get(c) or (chr(c) if 32 <= c < 127 else f'\\{c:03o}') for c in line) + '"' for line in lines)


output, name, root, *files = sys.argv[1:]
with open(output, 'w', encoding='ascii') as out:
    out.write(f'static const struct embedded_file {name}[] = {{\n')
    for file in files:
        with open(file, 'rb') as source:
            data = source.read()
        path = os.path.relpath(file, root).replace(os.sep, '/')
        etag = hashlib.sha256(data).hexdigest()[:20]
        out.write(f'{{"{path}", "{types[os.path.splitext(file)[1]]}", "\\"{etag}\\"",\n{literal(data)}, {len(data)}}},\n')
    out.write('};\n')
