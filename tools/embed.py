"""Writes JSON files, without their white space, as one list of C strings: embed.py OUTPUT NAME FILE…"""
import json
import sys

output, name, *files = sys.argv[1:]
with open(output, 'w', encoding='utf-8') as out:
    out.write(f'static const char *const {name}[] = {{\n')
    for file in files:
        with open(file, encoding='utf-8') as source:
            text = json.dumps(json.load(source), separators=(',', ':'))
        out.write(json.dumps(text) + ',\n')
    out.write('};\n')
