#!/bin/sh
# Starts a Mooncake master and one storage node on this host, and stops both when it is stopped.
#
#   pip install 'warmseed[mooncake]'        # on Debian also: apt-get install libibverbs1 libnuma1 libcurl4
#   sh mooncake-standalone.sh
#   MOONCAKE_CONFIG_PATH=mooncake.json warmseed doctor --warmup-cache-stores mooncake
#
# For a fleet: set HOST to an address that the other nodes reach, and put the same address into mooncake.json.
# Mooncake has no authentication: keep these ports inside a network you trust.
set -eu

HOST="${HOST:-127.0.0.1}"
RPC_PORT="${RPC_PORT:-50051}"
METRICS_PORT="${METRICS_PORT:-9003}"
NODE_PORT="${NODE_PORT:-50052}"
MEMORY="${MEMORY:-8GB}" # what the node lends to the store; touched only as it fills
PYTHON="${PYTHON:-python3}"

stop() {
    trap - EXIT INT TERM
    kill ${master:-} ${node:-} 2>/dev/null || true
    wait
}
trap stop EXIT INT TERM

# A lease of a minute: a part of 64 MiB then gets through at 10 Mbit/s.
mooncake_master --rpc_address="$HOST" --rpc_port="$RPC_PORT" \
    --metrics_host=127.0.0.1 --metrics_port="$METRICS_PORT" \
    --default_kv_lease_ttl=60s --enable_metric_reporting=false &
master=$!

"$PYTHON" - "$METRICS_PORT" <<'READY'
import sys, time, urllib.request
for _ in range(150):
    try:
        if b'"service_ready":true' in urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=1).read():
            sys.exit()
    except OSError:
        pass
    time.sleep(0.1)
sys.exit("mooncake_master did not become ready within 15 s")
READY

mooncake_client --host="$HOST" --port="$NODE_PORT" --global_segment_size="$MEMORY" \
    --master_server_address="$HOST:$RPC_PORT" --metadata_server=P2PHANDSHAKE --protocol=tcp &
node=$!

echo "Mooncake is up: master $HOST:$RPC_PORT, $MEMORY of memory. Stop with Ctrl-C."
wait "$node"
