"""Texts of the Models tab: English and Chinese."""

from __future__ import annotations

MODELS = {
    "Models": "模型",
    "This computer": "这台电脑",
    "looking at this computer": "正在查看这台电脑",
    "no GPU that can be used": "没有可用的 GPU",
    "{free} of {total} free": "空闲 {free} / {total}",
    "disk: {free} free": "磁盘：空闲 {free}",
    "RAM": "内存",
    "VRAM": "显存",
    "Models that fit this computer": "适合这台电脑的模型",
    "Found on the Hub": "在 Hub 上找到",
    "On this computer": "在这台电脑上",
    "Downloads": "下载",
    "small and quick": "小而快",
    "for laptops": "适合笔记本电脑",
    "fully open, English": "完全开放，英语",
    "English and Chinese": "英语与中文",
    "thinks before it answers": "先思考再回答",
    "thinks before it answers, writes code": "先思考再回答，擅长写代码",
    "thinks before it answers, reads pictures": "先思考再回答，能看图片",
    "strong, many languages": "能力强，多语言",
    "strong, many languages, reads pictures": "能力强，多语言，能看图片",
    "European languages": "欧洲语言",
    "{total} parameters": "{total} 参数",
    "{total} parameters, {active} a token": "{total} 参数，每词元 {active}",
    "{count} tokens of context": "上下文 {count} 个词元",
    "text only": "仅文本",
    "gated": "需授权",
    "Fits": "可以运行",
    "Does not fit into RAM; runs from the disk, slower": "内存放不下；可从磁盘运行，速度较慢",
    "Fits, with its experts on the disk": "可以运行，专家存放于磁盘",
    "{share} of the experts": "专家的 {share}",
    "{size} on the disk": "磁盘 {size}",
    "{size} on the disk already": "磁盘上已有 {size}",
    "from the disk": "从磁盘",
    "Does not fit now.": "目前放不下。",
    "Does it fit?": "放得下吗？",
    "Cannot be run": "无法运行",
    "est. at most {rate} tok/s": "估计最多 {rate} 词元/秒",
    "An estimate from measured memory and link rates, and an upper limit: not a measurement.": (
        "根据实测的内存与链路速度估计的上限，并非实测。"
    ),
    "without a draft": "无草稿",
    "loaded": "已加载",
    "Unload": "卸载",
    "Get and chat": "下载并聊天",
    "Only download": "仅下载",
    "in the download queue": "在下载队列中",
    "Load the folder": "加载文件夹",
    "Search": "搜索",
    "Search again": "再次搜索",
    "Search the Hugging Face Hub": "搜索 Hugging Face Hub",
    "Words, owner/name, or the address of a model's page": "关键词、owner/name，或模型页面的地址",
    "asking the Hub": "正在询问 Hub",
    "Nothing was found: try other words.": "什么也没找到：请换别的词。",
    "The draft": "草稿",
    "What drafts": "由什么来写草稿",
    "A low-bit copy of the experts writes ahead, or, on a GPU, the layer that a model was trained with for "
    "it (MTP), if it has one. It changes the speed, never the answer.": (
        "专家的低位副本提前书写；在 GPU 上，若模型有为此训练的层（MTP），则由该层书写。"
        "它只影响速度，从不影响回答。"
    ),
    "Instant, then a better one in the background": "即时生成，随后在后台生成更好的",
    "Instant only": "仅即时生成",
    "Ready-made": "现成的",
    "Ready-made GPTQ checkpoint of the same model": "同一模型的现成 GPTQ 检查点",
    "owner/name of a GPTQ repo, or a folder": "GPTQ 仓库的 owner/name，或文件夹",
    "Draft: {draft}": "草稿：{draft}",
    "a better one is being built": "正在生成更好的草稿",
    "A model folder elsewhere on this computer": "这台电脑上其他位置的模型文件夹",
    "/path/to/a/folder with config.json and safetensors files": (
        "/path/to/a/folder（含 config.json 与 safetensors 文件）"
    ),
    "Access token": "访问令牌",
    "Token of the Hugging Face Hub": "Hugging Face Hub 的令牌",
    "For gated and private models. It is kept in a file that only you can read.": (
        "用于需授权和私有的模型。保存在只有您能读取的文件中。"
    ),
    "Keep it": "保存",
    "Forget it": "删除它",
    "No token: models that are open to all need none.": "没有令牌：对所有人开放的模型不需要。",
    "A token that ends in {end} is used ({place}).": "正在使用以 {end} 结尾的令牌（{place}）。",
    "localmoe": "localmoe",
    "environment": "环境变量",
    "huggingface_hub": "huggingface_hub",
    "Kept. It is sent to the Hub alone, and only with what you ask of it.": (
        "已保存。它只发送给 Hub，且只随您的请求发送。"
    ),
    "Forgotten.": "已删除。",
    "Forgotten here; the Hugging Face library or HF_TOKEN has another one, which is used now.": (
        "已在此删除；Hugging Face 库或 HF_TOKEN 还有另一个令牌，现在使用它。"
    ),
    "unfinished download": "未完成的下载",
    "waiting": "等待中",
    "downloading": "下载中",
    "paused": "已暂停",
    "stopped by an error": "因错误而停止",
    "being deleted": "正在删除",
    "here": "已就位",
    "then it is loaded": "之后加载",
    "then it is loaded, with experts on the disk": "之后加载，专家存放于磁盘",
    "ready-made draft for {model}": "{model} 的现成草稿",
    "Pause": "暂停",
    "Go on": "继续",
    "Try again": "重试",
    "Cancel": "取消",
    "Delete what has arrived?": "删除已下载的部分？",
    "Delete the experts' file": "删除专家文件",
    "{size} of drafts or experts, made of a model of a folder or one that is gone": (
        "{size} 的草稿或专家，由文件夹中的模型或已不存在的模型生成"
    ),
    "This is gone already.": "它已不存在。",
    "made of it: {size}": "由它生成：{size}",
    "Delete and free {size}?": "删除并释放 {size}?",
    "No connection to the Hub: check the network, then try again.": "无法连接到 Hub：请检查网络后重试。",
    "There is no such model, or it is private: check its name, or give a token.": (
        "没有这个模型，或它是私有的：请检查名称，或提供令牌。"
    ),
    "This model is gated: ask for access on its page of the Hub, then give a token.": (
        "此模型需要授权：请在 Hub 的模型页面申请访问，然后提供令牌。"
    ),
    "The disk is full: delete a model you no longer need, or free some space, then go on.": (
        "磁盘已满：请删除不再需要的模型，或腾出空间，然后继续。"
    ),
    "localmoe cannot run this model: choose another one.": "localmoe 无法运行此模型：请选择别的模型。",
    "The download failed.": "下载失败。",
    "This is no access token: paste one word of 8 to 200 letters, such as hf_...": (
        "这不是访问令牌：请粘贴一个 8 到 200 个字符的词，例如 hf_……"
    ),
    "Name the ready-made draft under The draft: a GPTQ repo or a folder.": (
        "请在“草稿”中指明现成的草稿：GPTQ 仓库或文件夹。"
    ),
    "This is no model of the Hub.": "这不是 Hub 上的模型。",
    "This download is no longer in the queue.": "此下载已不在队列中。",
    "This download is gone: it has ended, or was deleted.": "此下载已不存在：它已结束，或已被删除。",
    "This is no number.": "这不是数字。",
    "This button is of an older page: load the page again.": "此按钮属于旧页面：请重新加载页面。",
    "localmoe is ending.": "localmoe 正在结束。",
    "The part of localmoe that talks to the Hub ended unexpectedly; the terminal window shows the details. "
    "Try again.": "localmoe 中与 Hub 通信的部分意外结束；详情见终端窗口。请重试。",
}
