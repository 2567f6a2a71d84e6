#!/usr/bin/env bash
# Run the papers' comparisons again, a table at a time, on the GPU (or, in miniature, the CPU) at hand:
#
#   results/reproduce.sh table2      Tiny-ImageNet-100: every attention in the Tiny pyramid, as in the papers (softpp, soft, ...)
#                                    and with average pooling and drop path, which gives 60% (softpp_average, ...); speed
#   results/reproduce.sh table6      the models of table2 at other picture sizes; trains them where table2 has not
#   results/reproduce.sh controls    SOFT++ without its attention and without its value convolution, at these sizes;
#                                    results/README.md has the latter with the EXTRA of ablations, too
#   results/reproduce.sh ablations   numbers of landmarks, samplers, overlap, Newton steps, starts; results/README.md has the
#                                    figures of EXTRA="--epochs 6 --warmup-epochs 0.6"
#   results/reproduce.sh precision   float32, bfloat16, float16: loss, gradient norms, skipped steps (precision_training.csv);
#                                    likewise
#   results/reproduce.sh lra         ListOps (made), image, text: 5,000, 35,000 and 20,000 steps for each of seven attentions;
#                                    fewer: EXTRA="--steps 3000"; results/README.md has text with --model-kwargs stride=16
#                                    for SOFT and SOFT++
#   results/reproduce.sh dense       VOC: UPerNet, Mask R-CNN, from the weights that table2 left in OUT, else from random ones;
#                                    needs the extra `dense`
#   results/reproduce.sh own         our own family beside itself without attention: Tiny-ImageNet-100 (there also with softmax and with
#                                    two convolutions), VOC (class maps by two heads), ListOps, image (--lr 1e-3) and text of LRA
#   results/reproduce.sh shapes      RetinaNet, Mask R-CNN and UPerNet on the embedded shapes, with and without attention; half an
#                                    hour on two cores
#   results/reproduce.sh twins       twins as pictures, likewise; benchmarks/twins.py has them as sequences
#   results/reproduce.sh speed       operator, the family beside its peers in one run, large pictures, one picture, detectors; on a
#                                    CPU smaller pictures, not compiled
#
# TI is the folder of Tiny-ImageNet-100 with train/ and val/ (table2 to precision), CIFAR that of CIFAR-10's grids or class
# folders and IMDB that of the reviews (lra), VOC that with JPEGImages/, SegmentationClass/ and annotations/ (dense).
#
# A table ends as OUT/TABLE*.csv (OUT: reproduced), with rows for every run and seed. A run's checkpoints and curves are in
# OUT/GROUP/RUN/SEED. What is there is not made again: start again after a stop. SEEDS="42 43 44" repeats every run with
# each (otherwise 42 alone). DEVICE=cpu leaves a GPU aside. EXTRA="..." is added to every training. To try a table out:
#
#   OUT=trial DEVICE=cpu EXTRA="--steps 2 --warmup-epochs 0 --batch-size 8" TI=folder results/reproduce.sh table2
#
# This EXTRA does for all tables; lra should also have --listops-train 50 --listops-eval 20 in it.
set -euo pipefail
OUT=${OUT:-reproduced}
SOFTFREE=${SOFTFREE:-softfree}
WITHOUT_ATTENTION=${WITHOUT_ATTENTION:-python $(dirname "$0")/../benchmarks/without_attention.py}
SEEDS=${SEEDS:-42}
DEVICE=${DEVICE:-auto}
EXTRA=${EXTRA:-}
CORES=$(getconf _NPROCESSORS_ONLN)
WORKERS=${WORKERS:-$((CORES < 8 ? CORES : 8))}
GRAPH=()
# Without the host's time, where there is a GPU.
if [ "$DEVICE" != cpu ] && command -v nvidia-smi > /dev/null; then GRAPH=(--cuda-graph); fi

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 2; }
need() { [ -d "${!1:-}" ] || { echo "reproduce.sh: set $1=$2, got '${!1:-}'" >&2; exit 2; }; }

# RUN COMMAND...: what leaves a run in the folder RUN, or goes on with it; not again what is done with the same arguments
once() {
  local run=$1; shift
  [ "$(cat "$run/done" 2> /dev/null)" = "$*" ] && return
  rm -f "$run"/scores*.csv  # of other arguments
  $SOFTFREE "$@" --output "$run"
  echo "$*" > "$run/done"
}

# RUN TASK ARGUMENTS...: train into the folder RUN
train() {
  local run=$1; shift
  # shellcheck disable=SC2086
  once "$run" train "$@" --channels-last --workers "$WORKERS" --device "$DEVICE" --resume auto $EXTRA
}

# NAME ARGUMENTS...: train on Tiny-ImageNet with every seed
tiny() {
  local name=$1 seed; shift
  for seed in $SEEDS; do
    train "$OUT/tiny_imagenet/$name/$seed" classification --data-dir "$TI" --recipe short --data-on-device \
      --seed "$seed" "$@"
  done
}

# FILE NAME ARGUMENTS...: score what `tiny` trained, into FILE in its folder
score() {
  local file=$1 name=$2 seed run; shift 2
  for seed in $SEEDS; do
    run=$OUT/tiny_imagenet/$name/$seed
    [ -f "$run/$file" ] || $SOFTFREE validate classification --checkpoint "$run/last" --data-dir "$TI" --data-on-device \
      --batch-size 250 --workers "$WORKERS" --device "$DEVICE" --csv "$run/$file" "$@"
  done
}

# TABLE GROUP FILE NAMES...: OUT/TABLE.csv from FILE in the folders OUT/GROUP/NAME/SEED
gather() {
  local table=$OUT/$1.csv group=$2 file=$3 name seed files=(); shift 3
  for name in "$@"; do for seed in $SEEDS; do files+=("$OUT/$group/$name/$seed/$file"); done; done
  awk 'FNR == 1 { n = split(FILENAME, folder, "/"); if (NR == 1) print "run,seed," $0 }
       FNR > 1 { print folder[n - 2] "," folder[n - 1] "," $0 }' "${files[@]}" > "$table"
  echo "reproduce.sh: $table: $file of ${#files[@]} runs in $OUT/$group"
}

# NAME ARGUMENTS...: measure into OUT/NAME.csv
measure() {
  local csv=$OUT/$1.csv; shift
  [ -f "$csv" ] || $SOFTFREE benchmark "$@" --device "$DEVICE" --csv "$csv"
}

RIVALS=(softmax linformer performer nystromformer soft softpp)
PYRAMIDS=(release "${RIVALS[@]}" "${RIVALS[@]/%/_average}")

pyramids() {
  local attention
  tiny release --model softpp_tiny_release
  for attention in "${RIVALS[@]}"; do tiny "$attention" --model softpp_tiny --attention "$attention"; done
  for attention in "${RIVALS[@]}"; do
    tiny "${attention}_average" --model softpp_tiny --attention "$attention" --drop-path 0.1 --model-kwargs global_pool=avg
  done
}

table2() {
  local name
  pyramids
  for name in "${PYRAMIDS[@]}"; do score scores.csv "$name"; done
  measure table2_throughput throughput --channels-last "${GRAPH[@]}" --draw "$OUT/table2_throughput.png"
  gather table2 tiny_imagenet scores.csv "${PYRAMIDS[@]}"
  gather table2_curves tiny_imagenet eval.csv "${PYRAMIDS[@]}"
}

table6() {
  local name counted=({release,nystromformer,soft,softpp,nystromformer_average,soft_average,softpp_average})
  pyramids
  for name in "${PYRAMIDS[@]}"; do score scores_stride.csv "$name" --img-size 128 192 256 384; done
  for name in "${counted[@]}"; do
    score scores_count.csv "$name" --img-size 128 192 256 384 --model-kwargs landmarks=conv:16
  done
  gather table6_stride tiny_imagenet scores_stride.csv "${PYRAMIDS[@]}"
  gather table6_count tiny_imagenet scores_count.csv "${counted[@]}"
}

# What controls, ablations and precisions vary. A run that diverges is a result: its steps are left out and counted to the end, and
# the other runs follow.
VARIANT=(--model softpp_tiny --drop-path 0.1 --max-skipped 1000000 --model-kwargs global_pool=avg)

controls() {
  local sizes=(--img-size 128 192 256 384)
  SOFTFREE=$WITHOUT_ATTENTION tiny without_attention "${VARIANT[@]}"
  SOFTFREE=$WITHOUT_ATTENTION score scores.csv without_attention "${sizes[@]}"
  tiny without_value_conv "${VARIANT[@]}" value_convs=0,0,0,0
  score scores.csv without_value_conv "${sizes[@]}"
  gather controls tiny_imagenet scores.csv without_{attention,value_conv}
}

ablations() {
  # At 128 x 128 the papers' strides leave 16 windows; these leave 64, as many as are asked for at most.
  local fine=strides=4,2,1,1 count sampler steps start name
  local names=(count_{16,36,49,64} sampler_{average,random,first} no_overlap steps_{5,10,20,40} start_{scaled,halving})
  for count in 16 36 49 64; do tiny "count_$count" "${VARIANT[@]}" $fine "landmarks=conv:$count"; done
  for sampler in average random first; do
    tiny "sampler_$sampler" "${VARIANT[@]}" $fine "landmarks=$sampler:49"
  done
  tiny no_overlap "${VARIANT[@]}" overlap=False
  for steps in 5 10 20 40; do tiny "steps_$steps" "${VARIANT[@]}" "iterations=$steps"; done
  for start in scaled halving; do tiny "start_$start" "${VARIANT[@]}" "start=$start"; done
  for name in "${names[@]}"; do score scores.csv "$name"; done
  gather ablations tiny_imagenet scores.csv "${names[@]}"
}

precision() {
  local attention dtype
  for attention in soft softpp; do for dtype in none bfloat16 float16; do
    tiny "precision_${attention}_$dtype" "${VARIANT[@]}" --attention "$attention" --amp-dtype "$dtype" --log-interval 10
  done; done
  gather precision_training tiny_imagenet train.csv precision_{soft,softpp}_{none,bfloat16,float16}
  gather precision_accuracy tiny_imagenet eval.csv precision_{soft,softpp}_{none,bfloat16,float16}
}

lra() {
  local task data seed run
  for task in listops image text; do
    case $task in listops) data=$OUT/listops ;; image) data=$CIFAR ;; text) data=$IMDB ;; esac
    for seed in $SEEDS; do
      run=$OUT/lra/$task/$seed
      # shellcheck disable=SC2086
      once "$run" compare --task $task --attentions soft softpp softmax nystromformer performer linformer reformer \
        --data-dir "$data" --seed "$seed" --device "$DEVICE" --csv "$run/scores.csv" --draw "$run/scores.png" $EXTRA
    done
  done
  gather lra lra scores.csv listops image text
}

# TASK NAME KWARGS WEIGHTS ARGUMENTS...: train on VOC from what `tiny WEIGHTS` left, where there is something, and score
voc() {
  local task=$1 name=$2 kwargs=$3 from=$4 seed run weights start; shift 4
  for seed in $SEEDS; do
    run=$OUT/voc/${task}_$name/$seed weights=$OUT/tiny_imagenet/$from/$seed start=()
    if [ -f "$weights/done" ]; then
      start=(--backbone-checkpoint "$weights/last")
    else
      echo "reproduce.sh: no $weights yet (results/reproduce.sh table2): starting from random weights" >&2
    fi
    # shellcheck disable=SC2086
    train "$run" "$task" --data-dir "$VOC" --model "${MODEL:-softpp_tiny}" ${kwargs:+--model-kwargs $kwargs} "${start[@]}" \
      --batch-size 16 --weight-decay 0.05 --eval-every 1000000 --seed "$seed" "$@"
    [ -f "$run/scores.csv" ] || $SOFTFREE validate "$task" --checkpoint "$run/last" --data-dir "$VOC" \
      --workers "$WORKERS" --device "$DEVICE" --csv "$run/scores.csv"
  done
}

UPERNET=(--recipe ade20k --steps 500 --crop 256 --short-side 256 --scales 0.75 1.5 --lr 5e-4)
MASK_RCNN=(
  --recipe 1x --detector mask-rcnn --short-sides 224 256 288 --short-side 288 --max-size 384 --anchor-size 16
  --proposals 128 --sched cosine --lr 3e-4 --min-lr 1e-5 --clip-grad 1.0
)

dense() {
  local attention task names
  for attention in softpp soft softmax; do
    voc segmentation $attention attention=$attention $attention "${UPERNET[@]}"
    voc detection $attention attention=$attention ${attention}_average "${MASK_RCNN[@]}" --steps 700
  done
  for attention in softpp soft; do  # landmarks by a fixed stride, as in the papers
    voc detection ${attention}_stride "attention=$attention landmarks=conv" ${attention}_average "${MASK_RCNN[@]}" --steps 500
  done
  for task in segmentation detection; do
    names=("$task"_{softpp,soft,softmax})
    [ "$task" = segmentation ] || names+=("$task"_{softpp,soft}_stride)
    gather "dense_$task" voc scores.csv "${names[@]}"
    gather "dense_${task}_curves" voc train.csv "${names[@]}"
  done
}

own() {
  local name command task arguments seed
  local variant=(--model softfree_tiny --drop-path 0.1 "${GRAPH[@]}")
  tiny softfree_softmax "${variant[@]}" --attention softmax
  tiny softfree_both "${variant[@]}" --model-kwargs value_convs=9,5,3,3
  for name in softfree_{softmax,both}; do score scores.csv $name --img-size 128 192 256; done
  for name in softfree softfree_without_attention; do
    command=$SOFTFREE
    [ $name = softfree ] || command=$WITHOUT_ATTENTION
    SOFTFREE=$command tiny $name "${variant[@]}"
    SOFTFREE=$command score scores.csv $name --img-size 128 192 256
    SOFTFREE=$command MODEL=softfree_tiny voc segmentation $name "" $name "${UPERNET[@]}"
    SOFTFREE=$command MODEL=softfree_tiny voc segmentation ${name}_linear "" $name "${UPERNET[@]}" --head linear
    SOFTFREE=$command MODEL=softfree_tiny voc detection $name "" $name "${MASK_RCNN[@]}" --steps 700
    for task in listops image text; do
      case $task in
        listops) arguments=(--data-dir "$OUT/listops" --steps 5000 --eval-every 500) ;;
        image) arguments=(
          --data-dir "$CIFAR" --steps 2500 --eval-every 700 --lr 1e-3 --model-kwargs value_conv=35 landmarks=average:128
          stride=8
        ) ;;
        text) arguments=(--data-dir "$IMDB" --steps 4000 --eval-every 1000 --model-kwargs stride=16) ;;
      esac
      for seed in $SEEDS; do
        # shellcheck disable=SC2086
        SOFTFREE=$command once "$OUT/own/${task}_$name/$seed" train longrange --task $task "${arguments[@]}" \
          --seed "$seed" --device "$DEVICE" --workers 2 --resume auto "${GRAPH[@]}" $EXTRA
      done
    done
  done
  gather own_tiny_imagenet tiny_imagenet scores.csv softfree{,_without_attention,_softmax,_both}
  gather own_segmentation voc scores.csv segmentation_softfree{,_without_attention}{,_linear}
  gather own_detection voc scores.csv detection_softfree{,_without_attention}
  gather own_longrange own eval.csv {listops,image,text}_softfree{,_without_attention}
}

# KINDS...: with and without attention, on data that need no files
embedded() {
  local kind name command seed run arguments task split
  for kind in "$@"; do
    split=()
    case $kind in
      retinanet) task=detection arguments=() ;;
      mask_rcnn) task=detection arguments=(--detector mask-rcnn) ;;
      upernet) task=segmentation arguments=() ;;
      twins) task=segmentation arguments=(--dataset twins) split=(--split test) ;;
    esac
    for name in softfree without_attention; do
      command=$SOFTFREE
      [ $name = softfree ] || command=$WITHOUT_ATTENTION
      for seed in $SEEDS; do
        run=$OUT/embedded/${kind}_$name/$seed
        # shellcheck disable=SC2086
        SOFTFREE=$command once "$run" train $task "${arguments[@]}" --seed "$seed" --device "$DEVICE" --resume auto $EXTRA
        [ -f "$run/scores.csv" ] || $command validate $task --checkpoint "$run/last" "${split[@]}" --device "$DEVICE" \
          --csv "$run/scores.csv"
      done
    done
    gather "$kind" embedded scores.csv "$kind"_{softfree,without_attention}
  done
}

shapes() { embedded retinanet mask_rcnn upernet; }

twins() { embedded twins; }

speed() {
  local model=(--torchcompile --channels-last --fuse-bn "${GRAPH[@]}") half=(--half) side batch=8 sides=(1024 2048) photos=()
  local attentions=(--model softfree_tiny --attentions softmax softpp softfree --channels-last "${GRAPH[@]}")
  if [ ${#GRAPH[@]} -eq 0 ]; then  # on a CPU compiling takes minutes, and larger pictures, too
    model=(--channels-last --fuse-bn) half=() batch=1 sides=(512) photos=(--img-size 320 480 --batch-size 1)
  fi
  measure speed_attention attention --attentions softpp softpp-solve softmax
  measure speed_tokens attention --attentions softpp softpp-solve --tokens 784 3136 16384 65536 262144 1048576 \
    --heads-times-batch 4 --draw "$OUT/speed_tokens.png"
  measure speed_tiny model softfree_tiny softpp_tiny pvt_v2_b1 "${model[@]}"
  measure speed_small model softfree_small softpp_small efficientvit_b2 convnext_tiny swin_tiny_patch4_window7_224 caformer_s18 \
    mambaout_tiny "${model[@]}"
  measure speed_family model softfree_medium softfree_large softfree_vit_small "${model[@]}"
  for side in "${sides[@]}"; do
    measure "speed_$side" throughput "${attentions[@]}" --img-size "$side" --batch-size "$batch"
    batch=2
  done
  measure speed_latency latency softfree_tiny pvt_v2_b1 swin_tiny_patch4_window7_224 --batch-sizes 1 "${half[@]}"
  measure speed_memory memory --draw "$OUT/speed_memory.png"
  measure speed_detector detector softfree_small swin_tiny_patch4_window7_224 resnet50 --detector mask-rcnn \
    --model-kwargs drop_path_rate=0 --channels-last "${GRAPH[@]}" "${photos[@]}"
}

[ $# -gt 0 ] || usage
for table in "$@"; do
  case $table in
    table2 | table6 | controls | ablations | precision) need TI "the folder of Tiny-ImageNet-100, with train/ and val/" ;;
    lra)
      need CIFAR "the folder of CIFAR-10's grids or class folders"
      need IMDB "the folder of IMDb reviews"
      ;;
    own)
      need TI "the folder of Tiny-ImageNet-100, with train/ and val/"
      need VOC "the folder of PASCAL VOC 2012, with JPEGImages/, SegmentationClass/ and annotations/"
      need CIFAR "the folder of CIFAR-10's grids or class folders"
      need IMDB "the folder of IMDb reviews"
      ;;
    dense) need VOC "the folder of PASCAL VOC 2012, with JPEGImages/, SegmentationClass/ and annotations/" ;;
    shapes | twins | speed) ;;
    *) usage ;;
  esac
done
mkdir -p "$OUT"
for table in "$@"; do "$table"; done
