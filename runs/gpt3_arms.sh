# Read by the GPT-3 recipes: the flags of $arm out of $on_cl and $on_ltd, and how to start it. $usage: an example.
case $arm in
    baseline) flags="--pool=off --seqlen=off --ltd=off" ;;
    cl) flags="$on_cl --ltd=off" ;;
    ltd) flags="--pool=off --seqlen=off $on_ltd" ;;
    both) flags="$on_cl $on_ltd" ;;
    *) echo "error: ARM=$arm must be baseline, cl, ltd or both: $usage" >&2; exit 2 ;;
esac
launch=${LAUNCH:-torchrun --nproc_per_node=8}           # LAUNCH="torchrun --nnodes=8 --nproc_per_node=8 --rdzv_..." for more hosts
case " $* " in *" --plan "*) launch=${PYTHON:-python} ;; esac
