#!/bin/bash
# The job of recipe.yaml, written by `mopd slurm`. `sbatch runs/one/job/job.sh` submits it again.
#
# What stands where:
#   node 0: ranks 0 to 3 of the student on GPUs 0 to 3; rollout.0 on GPU 4; rollout.1 on GPU 5; rollout.2 on GPU 6; rollout.3 on GPU 7
#   node 1: ranks 4 to 7 of the student on GPUs 0 to 3; teachers.math.0 on GPUs 4 to 7
#   node 2: ranks 8 to 11 of the student on GPUs 0 to 3; teachers.math.1 on GPUs 4 to 7
#   node 3: ranks 12 to 15 of the student on GPUs 0 to 3
#   node 4: spare
#   node 5: spare
#
#SBATCH --job-name=mopd-one
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/runs/one/logs/job/%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --nodes=6
#SBATCH --ntasks-per-node=1
#SBATCH --partition=h100
#SBATCH --account=lab
#SBATCH --time=1-00
#SBATCH --no-kill
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0

set -e  # a line of slurm.setup that fails ends the job
eval 'module load cuda'
set +e

run=runs/one
own=()  # keys of this run
recipe=runs/one/job/recipe.yaml
mapfile -t nodes_0 < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

mopd=(/environment/bin/python -m mopd)
step=(srun --overlap --cpu-bind=none --mem=0)  # beside others: cores and memory are shared
# shellcheck disable=SC2034 # used in jobs of some forms
here=()  # before what runs on this node

address_of() {  # NODE: its address, as its name may mean nothing elsewhere
  scontrol show node "$1" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2
}
MOPD_RUN_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')  # against what others write into the launchers' store
export MOPD_RUN_SECRET
head=$(address_of "${nodes_0[0]}")
port=$((20000 + SLURM_JOB_ID % 2500 * 4))  # and the next two: jobs that share a node have different ones

# shellcheck disable=SC2317,SC2329 # steps call it too
on_gpus() {  # NUMBERS COMMAND…: it sees these of the job's GPUs on its node, and no others
  local all own=() number
  IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"
  for number in $1; do own+=("${all[number]}"); done
  CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${own[*]}")" exec "${@:2}"
}
export -f on_gpus

# shellcheck disable=SC2317,SC2329 # the trap calls it
request() {  # WHO: what `mopd stop` writes; no container has to start for it
  mkdir -p "$run"
  printf '{"by": "%s", "is_users": false}\n' "$1" >"$run/.stop.$BASHPID" && mv "$run/.stop.$BASHPID" "$run/stop"
}

stopping=
# shellcheck disable=SC2317,SC2329 # the trap calls it
ask_to_stop() {  # SIGNAL: the limit comes near, another job needs the nodes, or scancel was called
  local why="whose time is up"
  [ -z "$stopping" ] || return 0  # the first one's reason counts
  stopping=1
  [ "$1" = USR1 ] || case $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) in
    RUNNING*) why="which is preempted" ;;
    ?*) why="which was cancelled" ;;
    *) why="which got SIGTERM, and squeue does not say why" ;;
  esac
  request "job $SLURM_JOB_ID, $why"
}
trap 'ask_to_stop USR1' USR1
trap 'ask_to_stop TERM' TERM

await() {  # PROCESS: its exit code; a signal's trap runs meanwhile
  local code
  while wait "$1"; code=$?; [ "$code" -gt 128 ] && kill -0 "$1" 2>/dev/null; do :; done
  return "$code"
}

finish() {  # EXIT-CODE: the end of this job, or its way back into the queue
  case $1 in
    0 | 2) exit "$1" ;;                   # done, or a line has said what to change: it would come again
    75) [ -n "$stopping" ] || exit 75 ;;  # `mopd stop` ends the job for good
  esac
  case $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) in
    RUNNING*)  # and not being cancelled
      echo "job $SLURM_JOB_ID: exit code $1: back into the queue"
      scontrol requeue "$SLURM_JOB_ID"
      ;;
    "") echo "job $SLURM_JOB_ID: exit code $1: not back into the queue, as squeue does not say whether it was cancelled" ;;
  esac
  exit "$1"
}

# Do the nodes go together? One line says what does not.
# shellcheck disable=SC2016 # the task on the node knows its number
"${step[@]}" --nodes=6 --ntasks=6 --ntasks-per-node=1 \
  bash -c 'exec "$@" --node-rank "$SLURM_PROCID"' check \
  "${mopd[@]}" check "$recipe" --nodes --nnodes 6 --rdzv-endpoint "$head:$((port + 1))" "${own[@]}" &
await $! || finish $?

is_lost() {  # NODE: whether Slurm has lost it; a star marks one that does not answer
  case $(sinfo --noheader --nodes="$1" --format=%T) in
    *down* | *drain* | *fail* | *\*) ;;
    *) return 1 ;;
  esac
}
moved=$(mktemp -d)  # spare node -> the node whose place it has taken
trap 'rm -rf "$moved"' EXIT
place_of() {  # COMPONENT NODE FAILURES: where its replicas go on: there, or on a spare node that is theirs alone
  local -n nodes=nodes_$1
  local spare
  if [ "$3" -eq 1 ] && ! is_lost "$2"; then echo "$2"; return; fi
  for spare in "${nodes[@]: -2}"; do
    ln -s "$2" "$moved/$spare" 2>/dev/null  # one of all replicas is the first
    [ "$spare" = "$2" ] || [ "$(readlink "$moved/$spare")" != "$2" ] || { echo "$spare"; return; }
  done
  echo "$2"
}
serve() {  # NODE ROLE GPUS ARGUMENTS…: a replica, which registers with the run
  local node=$1 role=$2 code began failures=0 start=()
  shift 2
  start=(bash -c 'on_gpus "$@"' serve "$1")
  shift
  while :; do
    mkdir -p "$run/logs/$node"
    began=$SECONDS
    "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$node" \
      "${start[@]}" "${mopd[@]}" serve "$recipe" "$@" --register "$run/replicas" --host "$(address_of "$node")" "${own[@]}" \
      >>"$run/logs/$node/$role.log" 2>&1
    code=$?
    [ "$code" -ne 0 ] || is_lost "$node" || return 0  # it was asked to; but to srun a lost node's step has ended with 0
    kill -0 $$ 2>/dev/null || return 0  # the job is over, and has ended its steps
    if [ "$code" -eq 2 ] && [ ! -e "$run/metrics.jsonl" ]; then  # the recipe's fault: end what waits for it
      echo "$role has ended with an error: $run/logs/$node/$role.log"
      while [ ! -e "$run/metrics.jsonl" ]; do  # a start forgets older requests
        request "$role, which has ended with an error"
        sleep 5
      done
      return
    fi
    [ $((SECONDS - began)) -lt 3600 ] || failures=0
    failures=$((failures + 1))
    echo "$role has ended on $node with exit code $code, $failures of 4 in a row: $run/logs/$node/$role.log"
    [ "$failures" -lt 4 ] || return
    sleep $((5 * 2 ** (failures - 1)))
    kill -0 $$ 2>/dev/null || return 0
    node=$(place_of 0 "$node" "$failures")
  done
}
serve "${nodes_0[0]}" rollout.0 4 --rollout --replica 0 &
serve "${nodes_0[0]}" rollout.1 5 --rollout --replica 1 &
serve "${nodes_0[0]}" rollout.2 6 --rollout --replica 2 &
serve "${nodes_0[0]}" rollout.3 7 --rollout --replica 3 &
serve "${nodes_0[1]}" teachers.math.0 '4 5 6 7' --teacher=math --replica 0 &
serve "${nodes_0[2]}" teachers.math.1 '4 5 6 7' --teacher=math --replica 1 &

# The trainer: a launcher on each of the student's nodes. The first one's exit code is the run's.
trainer=(on_gpus '0 1 2 3')
train=("${mopd[@]}" train "$recipe" --resume=auto --nnodes 4 --rdzv-endpoint "$head:$port" "${own[@]}")
# shellcheck disable=SC2016 # the task on the node knows its number
"${step[@]}" --nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist="$(IFS=,; echo "${nodes_0[*]:1:3}")" --kill-on-bad-exit=0 \
  bash -c 'on_gpus "$0" "$@" --node-rank "$((SLURM_PROCID + 1))"' '0 1 2 3' "${train[@]}" &
others=$!
"${trainer[@]}" "${train[@]}" --node-rank 0 &
await $!
code=$?
for _ in {1..60}; do  # for the others' last lines; one whose node is gone never says that it ended
  kill -0 "$others" 2>/dev/null || break
  sleep 1
done
finish "$code"
