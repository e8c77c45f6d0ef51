"""Texts of pictures in messages: English and Chinese."""

from __future__ import annotations

PICTURES = {
    "{name} is no picture that can be read: use PNG, JPEG, WebP, GIF or BMP.": (
        "{name} 不是可以读取的图片：请使用 PNG、JPEG、WebP、GIF 或 BMP。"
    ),
    "It is no picture that can be read: use PNG, JPEG, WEBP, GIF or BMP.": (
        "这不是可以读取的图片：请使用 PNG、JPEG、WEBP、GIF 或 BMP。"
    ),
    "The picture has more than {size}: use a smaller one.": "图片超过 {size}：请使用更小的图片。",
    "{name} was left out: a message takes {count} pictures.": "未附上 {name}：一条消息最多 {count} 张图片。",
    "{name} could not be attached: is localmoe still running?": "无法附上 {name}：localmoe 还在运行吗？",
    "reads pictures": "能读取图片",
    "Remove {name}": "移除 {name}",
    "Pictures of this message": "此消息的图片",
    "Picture {number} of {total}": "第 {number} 张图片，共 {total} 张",
    "Open it whole in a new tab": "在新标签页中打开完整图片",
    "A picture that is not on the disk any more": "图片已不在磁盘上",
    "Pictures, which only an export as JSON holds: {count}": "图片（仅 JSON 导出包含）：{count}",
    "The model is still loading: attach pictures when it is ready.": "模型仍在加载：请在就绪后再附上图片。",
    "No model is loaded: choose one that reads pictures under Models, then attach them again.": (
        "尚未加载模型：请在“模型”中选择一个能读取图片的模型，再重新附上图片。"
    ),
    "{model} reads no pictures: load a model that does under Models, then attach them again.": (
        "{model} 不能读取图片：请在“模型”中加载能读取图片的模型，再重新附上图片。"
    ),
    "A picture was not attached: attach it again, or send the message without it.": (
        "有一张图片未附上：请重新附上，或不带图片发送消息。"
    ),
    "A picture of this chat is not on the disk any more: attach the same file again, which brings it back, "
    "or edit its message and remove it there.": (
        "此聊天中的一张图片已不在磁盘上：请再次附上同一文件以恢复它，或编辑其消息并在那里移除它。"
    ),
    "Get its picture settings": "获取其图片设置",
    "{model} was downloaded without what says how it reads pictures: press {button} under Models, then "
    "attach them again.": (
        "下载 {model} 时缺少读取图片所需的设置：请在“模型”中按“{button}”，再重新附上图片。"
    ),
    "{model} lacks what says how it reads pictures: put its makers' {file} into its folder and load it "
    "again.": "{model} 缺少读取图片所需的设置：请把其制作者的 {file} 放入它的文件夹并重新加载。",
}
