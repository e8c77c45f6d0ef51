"""Texts of the live map, the step timeline, hover texts and the Logs tab: English and Chinese."""

from __future__ import annotations

LIVE = {
    # hover texts of the panel
    "time from pressing Send to the first token: the prompt is read in it": (
        "从按下发送到首个词元的时间，其间读取提示"
    ),
    "tokens of the answer so far; a token is about four letters of English": (
        "目前回答的词元数；一个词元约为四个英文字母"
    ),
    "tokens written a second, after the first one": "首个词元之后每秒写出的词元数",
    "tokens of the draft that one pass of the 16-bit model checks in a step": (
        "16 位模型每步一次检查的草稿词元数"
    ),
    "everything but the routed experts: attention, embeddings, routers, shared experts": (
        "路由专家以外的一切：注意力、嵌入、路由器、共享专家"
    ),
    "the small copy of the experts that proposes tokens; in device memory whole or not at all": (
        "提出词元的小型专家副本；要么完整地在设备内存中，要么完全不在"
    ),
    "The draft is laid aside: answers are faster with experts in its memory. A fixed draft length brings it "
    "back.": "草稿已搁置：它的内存让给专家后，回答更快。设为固定的草稿长度会让它回来。",
    "keys and values of the conversation so far": "到目前为止对话的键和值",
    "room for 16-bit experts; the more, the fewer copies": "存放 16 位专家的空间；越多，复制越少",
    "memory for what is computed in between": "用于中间计算结果的内存",
    "memory for what is computed in between, which slots do not take": "用于中间计算结果的内存，槽位不会占用",
    "held now, of the budget that you gave": "现在占用的部分，相对于您给出的预算",
    "bytes of experts copied to device memory for this answer, its prompt included": (
        "为本次回答（包括提示）复制到设备内存的专家字节数"
    ),
    "the same for each token after the first one: what the link limits the speed by": (
        "首个词元之后每个词元的同一数值：链路以此限制速度"
    ),
    "time in which the model stood still for experts that were not in device memory": (
        "模型因专家不在设备内存中而停等的时间"
    ),
    "the way that experts take from RAM to device memory": "专家从内存到设备内存所经的路径",
    # expert cache
    "experts that were in device memory when the model asked for them": "模型需要时已在设备内存中的专家",
    "experts whose copy had begun but was not complete when the model asked": (
        "模型需要时已开始但尚未完成复制的专家"
    ),
    "experts whose copy began only when the model asked for them": "模型需要时才开始复制的专家",
    "experts that were in RAM when the model asked for them": "模型需要时已在内存中的专家",
    "experts whose reading had begun but was not complete when the model asked": (
        "模型需要时已开始但尚未完成读取的专家"
    ),
    "experts whose reading from the disk began only when the model asked for them": (
        "模型需要时才开始从磁盘读取的专家"
    ),
    "share of the experts that the model asked for that were in RAM at that moment": (
        "模型所需的专家中当时已在内存里的比例"
    ),
    "experts read before the model asked for them; unused: given up without being asked for": (
        "在模型需要之前读取的专家；未使用：从未被需要就被放弃"
    ),
    "experts that the CPU computed from RAM while the GPU went on": "GPU 继续工作时由 CPU 从内存计算的专家",
    "share of the experts that the model asked for that were in device memory at that moment": (
        "模型所需的专家中当时已在设备内存里的比例"
    ),
    "Prefetched": "预取",
    "{count} ({unused} unused)": "{count}（未使用 {unused}）",
    "experts copied before the model asked for them; unused: evicted without being asked for": (
        "在模型需要之前复制的专家；未使用：从未被需要就被换出"
    ),
    "Reused without a copy": "无需复制即复用",
    "{reached}, at best {best}": "{reached}，最多 {best}",
    "at best {best} (first steps)": "最多 {best}（开头的步骤）",
    (
        "share of what the model asked for that needed no copy; beside it the best that any cache of this "
        "size could do that knows the whole answer in advance (Belady's rule). Prefetching makes the hit "
        "rate higher than this, as it copies the same bytes earlier"
    ): (
        "模型所需中无需复制的比例；旁边是同样大小、预知整个回答的缓存所能达到的最好结果（Belady 规则）。"
        "预取只是更早复制同样的字节，因此命中率会高于此值"
    ),
    # map, link, timeline
    "layer {layer}, expert {expert}: {place}, asked for in {share} of the recent passes": (
        "第 {layer} 层，专家 {expert}：{place}，最近 {share} 的遍历需要它"
    ),
    "a row a layer, a column an expert; the stronger the colour, the more passes asked for it lately": (
        "每行一层，每列一个专家；颜色越深，最近需要它的遍历越多"
    ),
    "Point at an expert to read of it.": "指向一个专家即可查看。",
    "The arrow keys read single experts.": "用方向键读取单个专家。",
    "in a slot": "在槽位中",
    "in RAM only": "仅在内存中",
    "on the disk only": "仅在磁盘上",
    "in RAM or on the disk": "在内存中或磁盘上",
    "{here} of {total} experts are in RAM.": "{total} 个专家中有 {here} 个在内存中。",
    "Where the experts are": "专家所在位置",
    "bytes a second copied in the last moments, beside what one copy alone was measured at": (
        "最近每秒复制的字节数，旁边是单次复制测得的速度"
    ),
    "Link use": "链路使用",
    "Now": "现在",
    "{now} of {most}": "{now}，最高 {most}",
    "{here} of {total} experts are in slots.": "{total} 个专家中有 {here} 个在槽位中。",
    "layer {layer} expert {expert}": "第 {layer} 层专家 {expert}",
    "Asked for most: {names}.": "需要最多：{names}。",
    "when drafts, passes of the 16-bit model, copies and waits ran in the last step": (
        "上一步中草稿、16 位模型遍历、复制和等待各在何时进行"
    ),
    "Step timeline": "步骤时间线",
    "Save for Perfetto": "保存供 Perfetto 使用",
    "all recorded steps, for ui.perfetto.dev or chrome://tracing": (
        "所有已记录的步骤，可用 ui.perfetto.dev 或 chrome://tracing 查看"
    ),
    "Recording: it shows with the next answer.": "正在记录：下一个回答时显示。",
    "the prompt": "提示",
    "step {number}": "第 {number} 步",
    "{count} copies, {size}": "{count} 次复制，{size}",
    "draft": "草稿",
    "16-bit model": "16 位模型",
    "experts on the CPU": "CPU 上的专家",
    "waiting": "等待",
    "copies": "复制",
    "host": "主机",
    # the Logs tab
    "Logs": "日志",
    "Log": "日志",
    "Show": "显示",
    "everything": "全部",
    "warnings and errors": "警告和错误",
    "errors only": "仅错误",
    "Follow": "跟随",
    "Copy": "复制",
    "Copied": "已复制",
    "Download": "下载",
    "The log has figures, names of models and errors, never what you write.": (
        "日志包含数字、模型名称和错误，绝不包含您写的内容。"
    ),
}
