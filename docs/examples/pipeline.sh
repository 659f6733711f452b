#!/usr/bin/env bash
# A scheduler, a worker on each of two hosts, and pipeline.py, in a folder that all of them see:
#
#     bash docs/examples/pipeline.sh FOLDER
#     bash docs/examples/pipeline.sh FOLDER "dask cuda worker" --cupy
#
# Here both hosts are this machine. With GPUs each gets one of them, and NCCL is told that they are different hosts.
set -euo pipefail
folder=$1 worker=${2:-dask worker --nthreads 1} workers=()
shift $(($# < 2 ? $# : 2))
trap 'kill "${workers[@]}" && wait "${workers[@]}" || true; kill "$scheduler" && wait' EXIT

# On the first host:
dask scheduler --scheduler-file "$folder/scheduler.json" --port 0 --dashboard-address :0 --preload dask_distmm \
  2>"$folder/scheduler.log" &
scheduler=$!

# On each host, there without the variables before it:
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_SOCKET_IFNAME=lo
for host in 0 1; do
  CUDA_VISIBLE_DEVICES=$host NCCL_HOSTID=host-$host \
    $worker --scheduler-file "$folder/scheduler.json" --name "host-$host" --dashboard-address :0 --preload dask_distmm \
    2>"$folder/host-$host.log" &
  workers+=($!)
done

# On the client's host:
python "$(dirname "$0")/pipeline.py" "$folder" --workers 2 "$@"
