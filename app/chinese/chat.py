"""Texts of the conversation, the list of chats, and the line above: English and Chinese."""

from __future__ import annotations

CHAT = {
    "Chat": "聊天",
    "New chat": "新聊天",
    "Chats": "聊天列表",
    "No chats yet.": "还没有聊天。",
    "Rename": "重命名",
    "Delete": "删除",
    "Delete?": "确认删除？",
    "New title": "新标题",
    "being answered": "正在回答",
    "Show earlier messages": "显示更早的消息",
    "Earlier messages of this chat": "本次聊天中更早的消息",
    "Last question and answer": "最近的问题与回答",
    "### What would you like to talk about?\n"
    "Everything runs on this computer; nothing you write leaves it.": (
        "### 想聊点什么？\n一切都在这台电脑上运行；您写的内容不会离开它。"
    ),
    "Message": "消息",
    "Your message": "您的消息",
    "Write a message": "写一条消息",
    "Send": "发送",
    "Stop": "停止",
    "not answered yet: press Retry": "尚未回答：请按“重试”",
    "an empty answer": "空的回答",
    "stopped before the first token": "在第一个词元之前已停止",
    "first token {time}": "首个词元 {time}",
    "{read} of {tokens} tokens read": "已读取 {read} / {tokens} 个词元",
    "{count} pictures to be read": "待读取 {count} 张图片",
    "{size} of experts from the disk": "从磁盘读取专家 {size}",
    "{count} tokens": "{count} 个词元",
    "hits {share}": "命中 {share}",
    "accepted {share}": "接受 {share}",
    "stopped": "已停止",
    "cut at the token limit": "达到词元上限而截断",
    "interrupted": "被中断",
    "Continue the answer": "继续回答",
    "Attach": "附件",
    "{name} is no text file in UTF-8: copy what it says instead.": "{name} 不是文本文件：请改为复制其内容。",
    "localmoe does not answer, as if it had been closed: start it again with python launch.py. This page "
    "then goes on by itself, with what you have written.": (
        "localmoe 没有响应，可能已被关闭：请用 python launch.py 重新启动。之后本页会自动继续，"
        "并保留您写的内容。"
    ),
    "Reading {name}": "正在读取 {name}",
    "{name} was left out, as the chat has changed meanwhile: attach it again.": (
        "对话已切换，未附上 {name}：请重新附上。"
    ),
    "{name} is too long for a message: attach a part of it.": "{name} 太长：请只附上其中一部分。",
    "{name} cannot be read: choose files, not folders.": "无法读取 {name}：请选择文件，而不是文件夹。",
    "There is no unfinished answer that the model could go on with.": "没有模型可以继续的未完成回答。",
    "accepted from the draft": "来自草稿并被接受",
    "Thought for {time}": "思考了 {time}",
    "Thoughts": "思考过程",
    "Thinking … {time}": "思考中…… {time}",
    "Stopped while thinking, after {time}": "思考 {time} 后停止",
    "about {count}": "约 {count}",
    "{used} of {context} tokens used; {left} are left for your next message and its answer.": (
        "已用 {used} / {context} 个词元；还剩 {left} 个用于您的下一条消息及其回答。"
    ),
    "{used} of {context} tokens used, with {typed} of your message; {left} are left for its answer.": (
        "含您这条消息的 {typed} 个词元，已用 {used} / {context} 个词元；还剩 {left} 个用于回答。"
    ),
    "Your message is too long: {left} of {context} tokens are left for it and its answer. Shorten "
    "it, begin a new chat, or load the model with a longer context under Settings.": (
        "您的消息太长：{context} 个词元中只剩 {left} 个用于它和它的回答。请缩短消息、开始新聊天，"
        "或在“设置”中以更长的上下文加载模型。"
    ),
    "Nearly full: {left} of {context} tokens are left for your next message and its answer, which "
    "would be cut there. A new chat or a longer context under Settings gives more room.": (
        "快满了：{context} 个词元中还剩 {left} 个用于您的下一条消息及其回答，超出处会被截断。"
        "新聊天或“设置”中更长的上下文会有更多空间。"
    ),
    "The context of {context} tokens is full: another message would be refused. Begin a new chat, "
    "edit an earlier message, or load the model with a longer context under Settings.": (
        "{context} 个词元的上下文已满：再发消息会被拒绝。请开始新聊天、编辑更早的消息，"
        "或在“设置”中以更长的上下文加载模型。"
    ),
    "Search the chats": "搜索聊天",
    "Search (Ctrl+K)": "搜索（Ctrl+K）",
    "No chat has these words.": "没有聊天包含这些词。",
    '<p class="lm-empty">No chats yet.</p>': '<p class="lm-empty">还没有聊天。</p>',
    "Export": "导出",
    "This chat with all versions": "此聊天及其所有版本",
    "What is shown, as a text": "所显示的内容，作为文本",
    "Import a chat": "导入聊天",
    "The file has more than {size}, and no more than that can be imported.": (
        "文件超过 {size}，无法导入更大的文件。"
    ),
    "The file could not be sent: is localmoe still running?": "无法发送文件：localmoe 还在运行吗？",
    "The file is no exported chat: choose a JSON or Markdown file that was exported here.": (
        "该文件不是导出的聊天：请选择在这里导出的 JSON 或 Markdown 文件。"
    ),
    "The file was exported by a newer version of localmoe: update this one to import it.": (
        "该文件由较新版本的 localmoe 导出：请更新后再导入。"
    ),
    "You": "您",
    "Answer": "回答",
    "version {number} of {total}": "第 {number} 个版本，共 {total} 个",
    "Previous version": "上一个版本",
    "Next version": "下一个版本",
    "The chat has changed meanwhile: open the message again to edit it.": (
        "聊天在此期间已改变：请重新打开该消息再编辑。"
    ),
    "This chat is being answered: wait for the end, or press Stop, to see its other versions.": (
        "此聊天正在回答：请等待结束或按“停止”，再查看其他版本。"
    ),
    "The model is still loading: send the message when it is ready.": "模型仍在加载：请在就绪后再发送。",
    "No model is loaded: choose one under Models.": "尚未加载模型：请在“模型”中选择一个。",
    "The message is empty: write something first.": "消息是空的：请先写点什么。",
    "There is no message to answer yet.": "还没有可以回答的消息。",
    "An answer is still being written: wait for its end, or press Stop first.": (
        "仍在写回答：请等待结束，或先按“停止”。"
    ),
    "Something went wrong inside localmoe; the terminal window shows the details.": (
        "localmoe 内部出错；详情见终端窗口。"
    ),
    "The answer could not begin, as the system has no memory or thread to give: close other programs and try "
    "again.": "无法开始回答，因为系统没有可用的内存或线程：请关闭其他程序后重试。",
    "Language": "语言",
    "Theme": "主题",
    "Live": "实时",
    "auto": "自动",
    "light": "浅色",
    "dark": "深色",
    "Show or hide the chats": "显示或隐藏聊天列表",
    "Show or hide the live panel": "显示或隐藏实时面板",
    "ready": "就绪",
    "loading": "加载中",
    "not loaded": "未加载",
    "starting": "正在开始",
    "Loading was stopped.": "加载已停止。",
    "The model was unloaded, and its memory is free for other programs.": (
        "模型已卸载，其内存可供其他程序使用。"
    ),
    "Stop loading": "停止加载",
    "a tiny demo model; choose a real one under Models": "一个很小的演示模型；请在“模型”中选择真正的模型",
    "Choose a model under Models, or change the budget under Settings.": (
        "请在“模型”中选择模型，或在“设置”中更改预算。"
    ),
    "Use {size} and load": "使用 {size} 并加载",
    "Use a context of {count} tokens and load": "使用 {count} 个词元的上下文并加载",
    "{size} budget": "预算 {size}",
    "drafting on": "草稿已开启",
    "drafting off": "草稿已关闭",
    "drafting by prompt lookup": "从已有文本中查找草稿",
    "draft laid aside": "草稿已搁置",
    "switched off": "已关闭",
    "it would not make the CPU faster, so none is built": "它不会让 CPU 更快，因此不构建",
    "{done} of {total}": "{done} / {total}",
    "about {time} left": "约剩 {time}",
    "Loading weights": "加载权重",
    "Loading the MTP layer": "加载 MTP 层",
    "Keep experts on the disk and load": "将专家存放于磁盘并加载",
    "Writing the experts' file": "正在写入专家文件",
    "Loading the draft": "加载草稿",
    "Building the 4-bit draft by rounding to nearest": "正在以就近取整生成 4 位草稿",
    "Building the 4-bit GPTQ draft": "正在生成 4 位 GPTQ 草稿",
    "Preparing": "准备中",
    "download": "下载",
    "experts": "个专家",
    "layers": "层",
    "files": "个文件",
    "This chat is no longer there: it was deleted.": "此对话已不存在：它已被删除。",
    "That is not the id of a chat.": "这不是对话的标识。",
    "This version of the message is not there.": "此消息没有这个版本。",
    "Only your own messages can be edited.": "只能编辑你自己的消息。",
}
