"""The Benchmark tab's Chinese."""

from __future__ import annotations

from collections.abc import Mapping

BENCHMARK: Mapping[str, str] = {
    "Benchmark": "基准测试",
    "<h2>This computer</h2><p>Measures the loaded model on prompts that come with localmoe, greedily, each "
    "setting from an empty cache.</p>": (
        "<h2>这台电脑</h2><p>用 localmoe 自带的提示以贪心方式测量已加载的模型，每种设置都从空缓存开始。</p>"
    ),
    "Policies": "策略",
    "Draft lengths": "草稿长度",
    "0: nothing is drafted.": "0：不起草。",
    "Prompts": "提示数",
    "Tokens a prompt": "每个提示的词元数",
    "Run the benchmark": "运行基准测试",
    "<h2>What if?</h2><p>Records which experts the loaded model uses, and simulates it on other cards, with "
    "the policies and the fixed draft lengths chosen above. Predicted, not measured.</p>": (
        "<h2>如果换一张卡？</h2><p>记录已加载的模型使用哪些专家，并用上面选择的策略和固定草稿长度在其他显卡上"
        "模拟它。这是预测，不是测量。</p>"
    ),
    "Cards": "显卡",
    "Memory of the card that the model may use": "模型可用的显卡内存",
    "auto: all of it, or a size such as 6GiB.": "auto：全部，或一个大小，例如 6GiB。",
    "Predict": "预测",
    "Stop the benchmark": "停止基准测试",
    "Results": "结果",
    "Delete this result": "删除此结果",
    "Waiting for the engine": "正在等待引擎",
    "Measuring {policy}, draft length {length}: answer {answer} of {answers}": (
        "正在测量 {policy}，草稿长度 {length}：第 {answer} / {answers} 个回答"
    ),
    "Recording which experts the model uses: answer {done} of {answers}": (
        "正在记录模型使用的专家：第 {done} / {answers} 个回答"
    ),
    "Simulating {card}": "正在模拟 {card}",
    "Stopped: nothing of it is kept.": "已停止：未保留任何内容。",
    "Done; the result is kept on this computer.": "已完成；结果保存在这台电脑上。",
    "other cards, predicted": "其他显卡，预测",
    "this computer, measured": "这台电脑，实测",
    "predicted": "预测",
    "measured": "实测",
    "Predicted": "预测",
    "Measured on this computer": "在这台电脑上实测",
    "All settings gave the same tokens.": "所有设置给出了相同的词元。",
    "The settings gave different tokens.": "不同设置给出了不同的词元。",
    "Predicted, not measured: the routing of {prompts} answers of this model, recorded here, on cards as "
    "their makers describe them.": (
        "这是预测，不是测量：用此处记录的该模型 {prompts} 个回答的路由，在厂商所述规格的显卡上模拟。"
    ),
    "Beside PCIe this computer's CPU computes what is not in their memory, at {rate}.": (
        "不在显存中的部分，除经由 PCIe 传输外，还由这台电脑的 CPU 以 {rate} 计算。"
    ),
    "What is not in their memory comes over PCIe alone, without the CPU's help.": (
        "不在显存中的部分仅经由 PCIe 传输，没有 CPU 的协助。"
    ),
    "The model's MTP layer drafts, which is not predicted: rows with drafts are left out.": (
        "由模型的 MTP 层起草，不做预测：略去带草稿的行。"
    ),
    "Their computers' RAM holds as many experts as here, {count}, and the others come from a disk that gives "
    "{rate}, as this one did.": (
        "假定这些电脑的内存与本机一样容纳 {count} 个专家，其余专家从磁盘读取，速度为本机实测的 {rate}。"
    ),
    "Their computers' RAM holds all experts: from the disk, as here, it would be slower.": (
        "假定那些电脑的内存放得下所有专家：若像这里一样从磁盘读取，会更慢。"
    ),
    "What an MTP layer drafts is not predicted: choose draft length 0.": (
        "MTP 层的起草不做预测：请选择草稿长度 0。"
    ),
    "Measured here: {accepted} of the drafted tokens accepted, {match} same experts.": (
        "此处实测：{accepted} 的草稿词元被接受，{match} 专家相同。"
    ),
    "policy, draft length": "策略，草稿长度",
    "Tokens a second and hit rate of {count} settings": "{count} 种设置的每秒词元数和命中率",
    "accepted": "接受率",
    "same experts": "专家相同",
    "late": "迟到",
    "draft a step": "每步起草",
    "tokens drafted": "起草词元",
    "verify a step": "每步验证",
    "copied a token": "每词元复制",
    "waited": "等待",
    "in VRAM": "在显存中",
    "reused": "复用",
    "best possible": "最佳可能",
    "waited a token": "每词元等待",
    "Save as {format}": "保存为 {format}",
    "This browser cannot make the picture: save it as SVG.": "此浏览器无法生成图片：请保存为 SVG。",
    "Chart": "图表",
    "Table": "表格",
    "A benchmark is running: wait for its end, or stop it first.": (
        "基准测试正在运行：请等待其结束，或先停止它。"
    ),
    "No policy is chosen: choose at least one.": "未选择策略：请至少选择一个。",
    "No draft length is chosen: choose at least one.": "未选择草稿长度：请至少选择一个。",
    "Nothing is chosen.": "未选择任何内容。",
    "No card is chosen: choose at least one.": "未选择显卡：请至少选择一张。",
    "Predictions need a fixed draft length: choose 0 or a number beside auto.": (
        "预测需要固定的草稿长度：请在 auto 之外选择 0 或一个数字。"
    ),
    "This result is not there any more.": "此结果已不存在。",
}
