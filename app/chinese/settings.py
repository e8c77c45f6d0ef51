"""Texts of the Settings tab: English and Chinese."""

from __future__ import annotations

SETTINGS = {
    "Settings": "设置",
    "<h2>Model and memory</h2>": "<h2>模型与内存</h2>",
    "Model": "模型",
    "A model on this computer, or a folder with its safetensors files.": (
        "这台电脑上的模型，或含有其 safetensors 文件的文件夹。"
    ),
    "auto, or a size such as 12GiB: what the engine may use of the device memory.": (
        "auto（自动），或 12GiB 这样的大小：引擎可以使用的设备内存。"
    ),
    "Context": "上下文",
    "auto, or the number of tokens that question and answer may have together; auto takes 4,096, or more "
    "where they need little memory.": (
        "auto（自动），或问题与回答合计的词元数；自动时为 4,096，若所需内存很少则更多。"
    ),
    "Build a better draft in the background": "在后台生成更好的草稿",
    "Between answers, for minutes to hours, it calibrates a second draft, which takes disk space and, on a "
    "GPU, meanwhile part of the budget; then more drafted tokens are accepted, and answers stay the same.": (
        "在回答之间用几分钟到几小时校准第二份草稿；它占用磁盘空间，在 GPU 上期间还占用部分预算；"
        "之后会有更多草稿词元被接受，回答保持不变。"
    ),
    "Advanced": "高级",
    "Emulated link": "模拟链路",
    "Slows copies, e.g. to 2GB/s, to study a slower machine (CPU only). Empty: off.": (
        "放慢复制（例如 2GB/s），以研究较慢的机器（仅 CPU）。留空：关闭。"
    ),
    "off": "关闭",
    "Apply": "应用",
    "<h2>Answers</h2><p>Kept at once; they hold from the next answer on.</p>": (
        "<h2>回答</h2><p>立即保存；从下一个回答起生效。</p>"
    ),
    "System prompt": "系统提示",
    "Given to the model before every chat. Empty: none.": "在每次聊天之前交给模型。留空：无。",
    "Draft length": "草稿长度",
    "How many tokens the draft writes ahead. It changes the speed, never the quality.": (
        "草稿提前写多少个词元。它只影响速度，从不影响质量。"
    ),
    "Auto": "自动",
    "Off": "关闭",
    "Fixed": "固定",
    "Drafted tokens a step": "每步草稿词元数",
    "1 to 64": "1 到 64",
    "As the model's makers recommend": "按模型制作者的建议",
    "Instead of temperature, top-p, top-k, min-p and repetition penalty, where the model has a "
    "recommendation. Changing one of them switches this off.": (
        "模型有建议时，用它代替温度、top-p、top-k、min-p 和重复惩罚。更改其中一个数值会关闭此项。"
    ),
    "For {model}: {sampling}.": "{model}：{sampling}。",
    "{model} has no recommendation: the numbers below are used.": "{model} 没有建议：使用下面的数值。",
    "always the likeliest token": "总是最可能的词元",
    "temperature": "温度",
    "repetition penalty": "重复惩罚",
    "Temperature": "温度",
    "0: always the likeliest token": "0：总是最可能的词元",
    "Top-p": "Top-p",
    "Top-k": "Top-k",
    "Min-p": "Min-p",
    "1: off": "1：关闭",
    "0: off": "0：关闭",
    "Max new tokens": "最多新词元",
    "An answer ends here at the latest": "回答最晚在此结束",
    "Repetition penalty": "重复惩罚",
    "Seed": "随机种子",
    "Thinking": "思考",
    "Whether, or how much, a reasoning model thinks before it answers, as far as it lets one choose. "
    "Without thoughts an answer comes sooner.": (
        "推理模型回答前是否思考、思考多少（在模型允许选择的范围内）。不思考则回答来得更快。"
    ),
    "As the model does it": "由模型决定",
    "On": "开启",
    "Low effort": "少量思考",
    "Medium effort": "中等思考",
    "High effort": "深入思考",
    "Empty: another one every time": "留空：每次都不同",
    "Prefetch policy": "预取策略",
    "Which experts are fetched, and when. It changes the speed, never the answer.": (
        "获取哪些专家以及何时获取。它只影响速度，从不影响回答。"
    ),
    "Saved system prompts": "已保存的系统提示",
    "Saved sampling settings": "已保存的采样设置",
    "Choose one, or type a new name and save.": "选择一个，或输入新名称并保存。",
    "Save preset": "保存预设",
    "Delete preset": "删除预设",
    "The preset is saved.": "预设已保存。",
    "The preset is deleted.": "预设已删除。",
    "Type a name for the preset first.": "请先输入预设名称。",
    "There is no preset of this name: choose one first.": "没有此名称的预设：请先选择一个。",
    "Colour what the draft wrote": "标出草稿所写的内容",
    "Marks the text of drafted tokens that the model accepted; answers are then shown "
    "without formatting.": "标出模型接受的草稿词元的文字；此时回答不带格式显示。",
    "{share} of the experts stay in {place} ({here} of {total})": (
        "{share} 的专家留在{place}中（{here} / {total})"
    ),
    "The model is loading: {progress}.": "模型正在加载：{progress}。",
    "Architecture": "架构",
    "Device": "设备",
    "Computed in": "计算精度",
    "Draft": "草稿",
    "Copies": "复制",
    "Exactness": "精确性",
    "the published weights, every token the target's choice; the CPU's sums run in another "
    "order, so last bits may depend on timing (strict leaves the CPU out)": (
        "模型发布时的权重，每个词元都由目标模型选择；CPU 的求和顺序不同，"
        "因此末位比特可能取决于时序（严格模式不使用 CPU）"
    ),
    "Steps": "步骤",
    "Lanes": "通道",
    "Strict": "严格",
    "The same bits whatever the settings and the timing: no experts are computed on the "
    "CPU. Slower where a model does not fit into VRAM.": (
        "无论设置和时序如何，比特都相同：不在 CPU 上计算专家。模型放不进显存时会更慢。"
    ),
    "Chat template": "聊天模板",
    "none: messages are given to the model as plain text": "无：消息以纯文本交给模型",
    "exact: the same bits for any draft length, policy and VRAM budget": (
        "精确：任何草稿长度、策略和显存预算下比特都相同"
    ),
    "Saved: it holds from the next answer on.": "已保存：从下一个回答起生效。",
    "Saved: a better draft is built in the pauses between answers.": (
        "已保存：在回答之间的空闲时生成更好的草稿。"
    ),
    "Saved: no better draft is built; what was finished of one is kept.": (
        "已保存：不再生成更好的草稿；已完成的部分会保留。"
    ),
    "Saved. Drafting was off when the model was loaded: press Apply to load it with its draft.": (
        "已保存。加载模型时草稿是关闭的：按“应用”以连同草稿一起加载。"
    ),
    "Choose the VRAM budget automatically": "自动选择显存预算",
    "All that is free but a reserve, and no more than the model can use.": (
        "除保留部分外的全部空闲显存，且不超过模型能用的量。"
    ),
    "VRAM budget in MiB": "显存预算（MiB）",
    "VRAM budget as a size": "以大小表示的显存预算",
    "2 bits": "2 位",
    "3 bits": "3 位",
    "4 bits": "4 位",
    "8 bits": "8 位",
    "Experts lie": "专家存放于",
    "in RAM": "内存中",
    "on the disk": "磁盘上",
    "On the disk for models that RAM does not hold: the first load writes them into a file beside the "
    "model's drafts, RAM holds as many as there is room for, and the others are read when they are asked "
    "for. Slower.": (
        "内存放不下的模型可存放在磁盘上：首次加载时把专家写入模型草稿旁的一个文件，"
        "内存能放多少就放多少，其余在需要时读取。速度较慢。"
    ),
    "RAM for experts on the disk": "磁盘上的专家可用的内存",
    "auto, or a size such as 12GiB: what those that lie on the disk may take of RAM; auto takes all that is "
    "free but a reserve.": (
        "auto（自动），或 12GiB 这样的大小：存放在磁盘上的专家可占用的内存；"
        "自动时使用除保留部分外的全部空闲内存。"
    ),
    "RAM has room for all experts, which are read from the disk when they are first asked for": (
        "内存放得下所有专家，首次需要时从磁盘读取"
    ),
    "RAM has room for {share} of the experts ({here} of {total}), the others are read from the disk": (
        "内存放得下 {share} 的专家（{here} / {total}），其余从磁盘读取"
    ),
    "The file of all experts takes {size} of the disk.": "所有专家的文件占用磁盘 {size}。",
    "The file of all experts, {size}, is on the disk already.": "所有专家的文件（{size}）已在磁盘上。",
    "Answers are slower by the time that reading takes, which is not predicted.": (
        "读取需要时间，回答会因此变慢，慢多少不作预测。"
    ),
    "RAM has room for all of them: where they lie in RAM, no file is needed.": (
        "内存放得下所有专家：若存放于内存中，则不需要文件。"
    ),
    "Apply loads {size} again and writes a file of {file}.": (
        "“应用”会重新加载 {size}，并写入一个 {file} 的文件。"
    ),
    "Apply loads the model again, without its experts.": "“应用”会重新加载模型，但不包括其专家。",
    "{count} threads": "{count} 个线程",
    "a matrix unit for prompts": "提示使用矩阵单元",
    "CPU, where they lie in RAM": "CPU，在内存中原地计算",
    "CPU, from RAM, and from the disk what is not there": "CPU，取自内存，不在内存中的取自磁盘",
    "VRAM and PCIe": "显存与 PCIe",
    "VRAM, PCIe and CPU": "显存、PCIe 与 CPU",
    "VRAM and CPU": "显存与 CPU",
    "VRAM and CPU, from RAM or the disk": "显存与 CPU（取自内存或磁盘）",
    "VRAM, PCIe and CPU, from RAM or the disk": "显存、PCIe 与 CPU（取自内存或磁盘）",
    "VRAM and PCIe, from the disk": "显存与 PCIe，取自磁盘",
    "RAM, from the disk": "内存，取自磁盘",
    "Drafted by": "由谁起草",
    "automatic": "自动",
    "the model itself, in low bits": "模型自身（低位版本）",
    "its MTP layer, where it has one": "模型的 MTP 层（若有）",
    "An MTP layer, which some models are published with (Qwen3.5, GLM 4.7, ...), takes some 0.5 GiB, a small "
    "part of what a draft in low bits takes. Automatic: that layer on a GPU, if the model has one, "
    "else the model itself.": (
        "有些模型（Qwen3.5、GLM 4.7 等）发布时带有 MTP 层，它约占 0.5 GiB，只是低位草稿的一小部分。"
        "自动：在 GPU 上，若模型有该层，则由该层起草，否则由模型自身起草。"
    ),
    "its MTP layer": "模型的 MTP 层",
    "this model has no MTP layer that can draft": "此模型没有可用于起草的 MTP 层",
    "This model has no MTP layer that can draft: it drafts as if that were not chosen.": (
        "此模型没有可用于起草的 MTP 层：将按未选择该项的方式起草。"
    ),
    "The ready-made draft is not used any more then.": "届时不再使用现成的草稿。",
    "A ready-made draft and the MTP layer cannot both draft: choose one of them.": (
        "现成的草稿和 MTP 层不能同时起草：请选择其中之一。"
    ),
    "Bits of the draft": "草稿的位数",
    "Fewer bits leave more VRAM to experts, and fewer drafted tokens are accepted. On a CPU, 2 and 3 bits "
    "take as much memory as 4.": (
        "位数越少，留给专家的显存越多，被接受的草稿词元越少。在 CPU 上，2 位和 3 位占用的内存与 4 位相同。"
    ),
    "Where experts outside VRAM come from": "显存之外的专家从何处来",
    "link: over PCIe. cpu: computed on the CPU. auto: what was measured to pay.": (
        "link：经 PCIe。cpu：在 CPU 上计算。auto：测得划算的方式。"
    ),
    "all": "全部",
    "vram+link": "显存 + 链路",
    "vram+cpu": "显存 + CPU",
    "CPU threads": "CPU 线程",
    "auto, or how many threads compute experts on the CPU.": "auto（自动），或在 CPU 上计算专家的线程数。",
    "Approximate answers": "近似回答",
    "Written by the low-bit draft alone, which nothing verifies: faster, and not the model's own words. "
    "Every such answer says so.": (
        "仅由低位草稿写出，不经验证：更快，但不是模型自己的话。每个这样的回答都会注明。"
    ),
    "approximate: written by the draft alone": "近似：仅由草稿写出",
    "approximate": "近似",
    "Use {size}": "使用 {size}",
    "What these settings buy is known once the model has been looked at.": (
        "查看模型之后才能知道这些设置的效果。"
    ),
    "What these settings buy is known once the model is loaded with them.": (
        "以这些设置加载模型之后才能知道它们的效果。"
    ),
    "no draft": "无草稿",
    "ready-made draft": "现成的草稿",
    "draft of {bits} bits": "{bits} 位草稿",
    "context {count} tokens (KV cache {size})": "上下文 {count} 个词元（KV 缓存 {size}）",
    "at most {rate} tok/s (predicted)": "最多 {rate} 词元/秒（预测）",
    "Budget {budget}; {free} of {total} would be free for it.": "预算 {budget}；共 {total}，可用 {free}。",
    "Apply changes this at once: nothing is loaded again.": "“应用”会立即生效：无需重新加载。",
    "Apply loads {size} again.": "“应用”会重新加载 {size}。",
    "Apply loads {size} again: about {time} at the speed of the last load.": (
        "“应用”会重新加载 {size}：按上次加载的速度约需 {time}。"
    ),
    "No model is chosen: choose one from the list, or give a folder.": (
        "未选择模型：请从列表中选择，或给出一个文件夹。"
    ),
    "An answer is being written: wait for its end or press Stop, then apply again.": (
        "正在写回答：请等待结束或按“停止”，然后再次应用。"
    ),
}
