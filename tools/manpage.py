"""A manual page from what a program says to --help: manpage.py OUTPUT PROGRAM SUMMARY"""
import os
import subprocess
import sys

output, program, summary = sys.argv[1:]
name = os.path.basename(program)
said = subprocess.run([program, '--help'], check=True, capture_output=True, text=True).stdout.rstrip()
usage, _, rest = said.partition('\n\n')


def escape(text):
    """Plain text as roff takes it: no line is a request, no backslash an escape, hyphens stay hyphens."""
    text = text.replace('\\', '\\e').replace('-', '\\-')
    return '\n'.join('\\&' + line if line[:1] in ".'" else line for line in text.split('\n'))


def verbatim(text):
    return f'.nf\n{escape(text)}\n.fi\n'


with open(output, 'w', encoding='utf-8') as out:
    out.write(f'.TH {name.upper()} 1\n.SH NAME\n{escape(name)} \\- {escape(summary)}\n')
    out.write('.SH SYNOPSIS\n' + verbatim(usage.replace('usage: ', '').replace('\n       ', '\n')))
    out.write('.SH DESCRIPTION\n' + verbatim(rest))
    others = [p for p in ('whimbrel', 'whimbrel-model', 'whimbrel-db', 'whimbrel-replay', 'whimbrel-bench', 'whimbrel-chat') if p != name]
    out.write('.SH SEE ALSO\n' + ',\n'.join(f'.BR {p} (1)'.replace('-', '\\-') for p in others).replace(',\n', ' ,\n') + '\n')
