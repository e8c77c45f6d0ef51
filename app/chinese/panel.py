"""Texts of the live panel: English and Chinese."""

from __future__ import annotations

PANEL = {
    "answering": "正在回答",
    "last answer": "上一个回答",
    "no answer yet": "还没有回答",
    "Speed": "速度",
    "tokens/s": "词元/秒",
    "First token": "首个词元",
    "time to first token": "到首个词元的时间",
    "Tokens": "词元",
    "Prompt": "提示",
    "{count} ({reused} reused)": "{count}（复用 {reused})",
    "tokens of the prompt; reused: read in an earlier turn, and kept since": (
        "提示的词元数；复用：在之前的轮次中已读取并保留"
    ),
    "tokens a second over the answer, at most {top}": "回答过程中每秒词元数，最高 {top}",
    "Expert cache": "专家缓存",
    "Hit rate": "命中率",
    "hits {hits}, late {late}, misses {misses}": "命中 {hits}，迟到 {late}，未命中 {misses}",
    "already in a slot": "已在槽位中",
    "copy in flight": "正在复制",
    "fetched on demand": "按需获取",
    "already in RAM": "已在内存中",
    "being read": "正在读取",
    "read on demand": "按需读取",
    "Room for experts": "可容纳的专家",
    "how many RAM holds at a time; the others are read from the disk when they are asked for": (
        "内存一次能容纳的数量；其余在需要时从磁盘读取"
    ),
    "Read from the disk": "从磁盘读取",
    "bytes of experts read from the disk for this answer, its prompt included, and how fast": (
        "为本次回答（包括提示）从磁盘读取的专家字节数，以及读取速度"
    ),
    "Read per token": "每词元读取",
    "the same for each token after the first one: what the disk limits the speed by": (
        "首个词元之后每个词元的同一数值：磁盘以此限制速度"
    ),
    "time in which the model stood still for experts that were not there": "模型因专家不在而停等的时间",
    "experts that were asked for of late, and the program itself; all lie on the disk": (
        "近期需要的专家以及程序本身；全部专家存放于磁盘"
    ),
    "computed on the CPU": "在 CPU 上计算",
    ", computed on the CPU {count}": "，在 CPU 上计算 {count}",
    "Read by the CPU": "CPU 读取",
    "weights that the CPU read to compute experts, beside the copies": (
        "CPU 为计算专家而读取的权重，与复制并行"
    ),
    "Drafting": "草稿",
    "Accepted": "接受率",
    "share of the drafted tokens that the 16-bit model agreed with": "16 位模型同意的草稿词元比例",
    "Draft length now": "当前草稿长度",
    "tokens of the draft checked in the last step; with the length on auto it follows what pays": (
        "上一步检查的草稿词元数；长度设为自动时，随收益而变"
    ),
    "Mean draft length": "平均草稿长度",
    "Left out": "未检查",
    "share of what the draft proposed that was not checked, as the draft itself was unsure of it": (
        "草稿提出但因其自身不确定而未检查的词元比例"
    ),
    "Looked up": "查得",
    "share of the checked tokens that were found further up in the text, not drafted": (
        "被检查的词元中，从前文查得而非由草稿写出的比例"
    ),
    "Expert match": "专家一致率",
    "share of (token, layer) where draft and target chose the same experts": (
        "草稿与目标选择相同专家的（词元，层）比例"
    ),
    "Better draft": "更好的草稿",
    "building a better draft": "正在生成更好的草稿",
    "It pauses while an answer is written.": "写回答时会暂停。",
    "Paused while the answer is written.": "正在写回答，已暂停。",
    "A better draft is being built in the background: {share} % done.": (
        "正在后台生成更好的草稿：已完成 {share} %。"
    ),
    "The better draft was not built.": "未能生成更好的草稿。",
    "Device memory": "设备内存",
    "Emulated device memory": "模拟的设备内存",
    "emulated device memory": "模拟的设备内存",
    "all experts are computed where they lie in RAM": "所有专家都在内存中原地计算",
    "nothing loaded": "未加载任何内容",
    "Used": "已用",
    "shared weights": "共享权重",
    "MTP layer": "MTP 层",
    "the layer that the model was trained with to predict one token more: it proposes tokens": (
        "模型训练时用来多预测一个词元的层：由它提出词元"
    ),
    "low-bit draft": "低比特草稿",
    "KV cache": "KV 缓存",
    "expert slots": "专家槽位",
    "workspace": "工作区",
    "kept free for activations": "为激活值预留",
    "other programs": "其他程序",
    "all experts, which are copied or computed from here, and the program itself": (
        "全部专家（由此复制或计算）以及程序本身"
    ),
    "what they could give up at once, as files kept in memory, is not counted": (
        "可立即释放的部分（如缓存在内存中的文件）不计入"
    ),
    "memory of this computer that is taken, at the last load or answer": ("上次加载或回答时本机已占用的内存"),
    "Copied to the device": "复制到设备",
    "This answer": "本次回答",
    "Per token": "每个词元",
    "Waited for experts": "等待专家",
    "Through": "经由",
    "emulated link": "模拟链路",
    "memory copy": "内存复制",
    "PCIe": "PCIe",
}
