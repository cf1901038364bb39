"""Deterministic Bindu agent: no model, no authentication, everything in memory. Env: PORT, STREAM=1 for a card that streams"""
import os, time
# Bindu writes its keys and logs beside this file.
os.chdir(os.path.dirname(os.path.abspath(__file__)))
PORT = os.environ.get('PORT', '9101')
for name, value in {'BINDU_PORT': PORT, 'STORAGE_TYPE': 'memory', 'SCHEDULER_TYPE': 'memory', 'AUTH_ENABLED': 'false',
                    'AUTH__ENABLED': 'false', 'TELEMETRY_ENABLED': 'false'}.items():
    os.environ.setdefault(name, value)
from bindu.penguin.bindufy import bindufy


def handler(messages):
    text = ''.join(part.get('text', '') for part in messages[-1].get('parts', []))
    if text.startswith('ask'):
        return {'state': 'input-required', 'prompt': 'which colour?'}
    if text.startswith(('fail', 'crash')):
        raise RuntimeError('planned failure')
    if text.startswith('slow'):
        time.sleep(20)
    return 'echo: ' + text


bindufy({'author': 'a@example.com', 'name': 'echo', 'description': 'echo', 'telemetry': False, 'skills': [],
         'capabilities': {'streaming': os.environ.get('STREAM') == '1'},
         'deployment': {'url': f'http://127.0.0.1:{PORT}', 'expose': False}}, handler)
