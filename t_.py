import json,sys,glob
for f in sorted(glob.glob('/tmp/m7-fuzz2/*.tokenizer.json')):
    b=json.load(open(f))
    m=b.pop('model'); m.pop('vocab'); m.pop('merges',0); print(f); print(b['normalizer'],b['pre_tokenizer']); print([t for t in b['added_tokens'] if not t['content'].startswith('<0x')]); print(m)
